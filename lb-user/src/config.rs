//! What the agent is told to do: the checked values of its flags.
//!
//! Here live the types, their text forms and the look-up of the cgroup2 mount. The flags themselves, their environment
//! variables and their help are `cli::agent`. A value of these types needs no further check.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::model::Cidr;
pub use crate::{desired::NodePortAddresses, source::Source as SourceSpec, view::Mode};

/// Everything that the agent is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where Services and EndpointSlices come from.
    pub source: SourceSpec,
    /// Whether to write to traffic.
    pub mode: Mode,
    /// The cgroup v2 directory to attach to.
    pub cgroup: PathBuf,
    /// The BPF file system.
    pub bpffs: PathBuf,
    /// The folder under the BPF file system that holds the pins.
    pub pin_name: String,
    /// This node's name, as EndpointSlices name it.
    pub node_name: String,
    /// Which of the node's addresses serve node ports.
    pub nodeport_addresses: NodePortAddresses,
    /// The node's addresses; empty to discover them.
    pub node_addresses: Vec<IpAddr>,
    /// Interfaces whose packets are observed.
    pub interfaces: Interfaces,
    /// Interfaces that lead out of the node, where packets are translated.
    pub uplinks: Uplinks,
    /// Interfaces with guests behind them, where packets are translated too.
    pub guests: Vec<NamePattern>,
    /// The node's own source ports towards backends on other nodes.
    pub snat_ports: PortRange,
    /// Cgroups whose sockets are not translated.
    pub opt_out_cgroups: Vec<PathBuf>,
    /// Where to serve metrics and health over HTTP; none to serve nothing.
    pub metrics_address: Option<SocketAddr>,
    /// The control socket.
    pub socket: PathBuf,
    /// Whether `spec.externalIPs` are served.
    pub external_ips: bool,
    /// Serve only Services with this `service.kubernetes.io/service-proxy-name`; none for those without one.
    pub proxy_name: Option<String>,
    /// The longest interval that counts as tuple reuse.
    pub reuse_horizon: Duration,
    /// The kubeconfig for the API server; none for the pod's own or the default one.
    pub kubeconfig: Option<PathBuf>,
    /// The API server's address where neither a kubeconfig nor a service account is to be used.
    pub kube_url: Option<String>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Which log lines are written.
    pub log_level: LogLevel,
    /// Sizes of the kernel's maps.
    pub limits: Limits,
    /// Whether metrics carry a series a backend.
    pub backend_metrics: bool,
    /// Whether metrics carry kube-proxy's names too.
    pub kube_proxy_metrics: bool,
    /// Whether to balance though kube-proxy is at work here.
    pub beside_kube_proxy: bool,
}

impl Config {
    /// The folder of the pins.
    pub fn pin_folder(&self) -> PathBuf {
        self.bpffs.join(&self.pin_name)
    }

    /// Whether packets of any interface are translated.
    pub fn translates(&self) -> bool {
        self.mode == Mode::Balance && (self.uplinks != Uplinks::None || !self.guests.is_empty())
    }
}

/// Sizes of the kernel's maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Frontends.
    pub frontends: NonZeroU32,
    /// Backends.
    pub backends: NonZeroU32,
    /// Sockets with state, of each kind.
    pub sockets: NonZeroU32,
    /// Flows of translated packets.
    pub flows: NonZeroU32,
}

/// Reads `primary`, `all` or a list of blocks.
pub fn parse_nodeport_addresses(text: &str) -> Result<NodePortAddresses, String> {
    match text {
        "primary" => Ok(NodePortAddresses::Primary),
        "all" => Ok(NodePortAddresses::All),
        blocks => blocks
            .split(',')
            .map(|block| block.trim().parse::<Cidr>().map_err(|error| error.to_string()))
            .collect::<Result<_, String>>()
            .map(NodePortAddresses::Ranges)
            .map_err(|error| {
                format!("{error}; allowed are primary, all and a list of blocks such as 10.0.0.0/8,fd00::/8")
            }),
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Which log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogLevel {
    /// What failed.
    Error,
    /// What somebody should look at, too.
    Warn,
    /// What changed, too.
    Info,
    /// Why, too.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// The level as a `tracing` filter.
    pub fn filter(self) -> tracing::level_filters::LevelFilter {
        use tracing::level_filters::LevelFilter;
        match self {
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
            Self::Trace => LevelFilter::TRACE,
        }
    }
}

/// Why there is no default for the cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The mount table cannot be read.
    #[error("/proc/self/mountinfo: {0}")]
    Mounts(#[source] io::Error),
    /// No cgroup v2 is mounted.
    #[error(
        "no cgroup v2 file system is mounted; mount one (mount -t cgroup2 none /sys/fs/cgroup) or name a cgroup with --cgroup"
    )]
    Absent,
}

/// Where the cgroup v2 hierarchy's root is mounted, by this process's mount table.
pub fn cgroup2_root() -> Result<PathBuf, CgroupError> {
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(CgroupError::Mounts)?;
    cgroup2_in(&table).ok_or(CgroupError::Absent)
}

/// Finds the cgroup2 mount in a mount table's text; a mount of the whole hierarchy is preferred to one of a part.
fn cgroup2_in(mountinfo: &str) -> Option<PathBuf> {
    let mounts = || {
        mountinfo.lines().filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let mut fields = before.split(' ').skip(3);
            let (root, target) = (fields.next()?, fields.next()?);
            (after.split(' ').next()? == "cgroup2").then(|| (root == "/", unescape(target)))
        })
    };
    let whole = mounts().find(|(whole, _)| *whole);
    whole.or_else(|| mounts().next()).map(|(_, target)| target)
}

/// Undoes the mount table's octal escapes (space, tab, newline, backslash).
fn unescape(text: &str) -> PathBuf {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    let plain = escapes
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
    PathBuf::from(plain)
}

/// Reads a pin folder's name: one plain component.
pub fn parse_pin_name(text: &str) -> Result<String, String> {
    let plain = text
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if text.is_empty() || text.len() > 64 || !plain {
        return Err("allowed are 1 to 64 letters, digits, `-` and `_`".to_owned());
    }
    Ok(text.to_owned())
}

/// Reads `ADDR:PORT` or `none`.
pub fn parse_metrics_address(text: &str) -> Result<Option<SocketAddr>, String> {
    if text == "none" {
        return Ok(None);
    }
    text.parse()
        .map(Some)
        .map_err(|_| "allowed are ADDR:PORT (such as 127.0.0.1:9975 or [::1]:9975) and none".to_owned())
}

/// Reads a whole or broken number of seconds between 1 and 3600.
pub fn parse_horizon(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "allowed are 1 to 3600 (seconds)".to_owned())?;
    if (1.0..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("allowed are 1 to 3600 (seconds)".to_owned())
    }
}

/// Whether a path lies on a cgroup v2 file system.
pub fn is_cgroup2(path: &Path) -> io::Result<bool> {
    let found = nix::sys::statfs::statfs(path)?;
    Ok(found.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}

/// Interfaces whose packets are observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interfaces {
    /// None.
    None,
    /// All of this network namespace, as they come and go.
    All,
    /// These.
    Named(Vec<String>),
}

impl Interfaces {
    /// Reads what the flag says: `all`, `none`, or names. Without a word it is all in observe mode, where packets alone tell the
    /// backend, and none in balance mode.
    ///
    /// # Errors
    /// When `all` or `none` stands beside other names.
    pub fn from_words(words: &[String], mode: Mode) -> Result<Self, String> {
        match words {
            [] if mode == Mode::Observe => Ok(Self::All),
            [] => Ok(Self::None),
            [word] if word == "all" => Ok(Self::All),
            [word] if word == "none" => Ok(Self::None),
            words => match words.iter().find(|word| *word == "all" || *word == "none") {
                Some(word) => Err(format!(
                    "`{word}` stands alone; allowed are `all`, `none`, or names of interfaces"
                )),
                None => Ok(Self::Named(words.to_vec())),
            },
        }
    }

    /// Whether any are observed.
    pub fn any(&self) -> bool {
        *self != Self::None
    }
}

/// Interfaces that lead out of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplinks {
    /// None: packets from outside are not translated.
    None,
    /// Those that the node's addresses and routes show, as they come and go.
    Auto,
    /// These, as they come and go.
    Named(Vec<String>),
}

impl Uplinks {
    /// Reads what the flag says: `auto`, `none`, or names. Without a word it is auto in balance mode, and none in observe mode,
    /// which allows nothing else.
    ///
    /// # Errors
    /// When `auto` or `none` stands beside other names, a word is no interface's name, or the mode allows no uplinks.
    pub fn from_words(words: &[String], mode: Mode) -> Result<Self, String> {
        let wanted = match words {
            [] if mode == Mode::Observe => Self::None,
            [] => Self::Auto,
            [word] if word == "auto" => Self::Auto,
            [word] if word == "none" => Self::None,
            words => {
                if let Some(word) = words.iter().find(|word| *word == "auto" || *word == "none") {
                    return Err(format!(
                        "`{word}` stands alone; allowed are `auto`, `none`, or names of interfaces"
                    ));
                }
                if let Some(word) = words.iter().find(|word| !is_interface_name(word)) {
                    return Err(format!("`{word}` is no interface's name"));
                }
                Self::Named(words.to_vec())
            }
        };
        if mode == Mode::Observe && wanted != Self::None {
            return Err("observe mode translates nothing; allowed is `none` there".to_owned());
        }
        Ok(wanted)
    }
}

/// The name of an interface, or how the names of several begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamePattern {
    /// This one.
    Exactly(String),
    /// All whose names begin like this.
    Prefix(String),
}

impl NamePattern {
    /// Whether it means the interface.
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Self::Exactly(wanted) => wanted == name,
            Self::Prefix(prefix) => name.starts_with(prefix),
        }
    }
}

impl std::str::FromStr for NamePattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, pattern) = match text.strip_suffix('*') {
            Some(prefix) => (prefix, Self::Prefix(prefix.to_owned())),
            None => (text, Self::Exactly(text.to_owned())),
        };
        if is_interface_name(name) {
            Ok(pattern)
        } else {
            Err("allowed are an interface's name, and the beginning of names with `*` behind it".to_owned())
        }
    }
}

/// Whether the kernel could have an interface of this name.
fn is_interface_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() < libc::IFNAMSIZ
        && text != "."
        && text != ".."
        && !text.contains(|c: char| c == '/' || c == ':' || c == '*' || c.is_whitespace())
}

/// A range of ports, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// The first.
    pub first: u16,
    /// The last.
    pub last: u16,
}

impl Default for PortRange {
    fn default() -> Self {
        Self {
            first: lb_common::flow::FIRST_PORT,
            last: lb_common::flow::LAST_PORT,
        }
    }
}

impl PortRange {
    /// The fewest ports that a range of sources has.
    pub const FEWEST: u16 = 16;

    /// Whether a port of another range is in it.
    pub fn overlaps(self, other: &std::ops::RangeInclusive<u16>) -> bool {
        self.first <= *other.end() && *other.start() <= self.last
    }
}

impl std::str::FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = || {
            format!(
                "allowed is FIRST-LAST, such as 10000-29999: from 1024 to 65535, {} ports or more",
                Self::FEWEST
            )
        };
        let (first, last) = text.split_once('-').ok_or_else(allowed)?;
        let read = |text: &str| text.parse::<u16>().map_err(|_| allowed());
        let (first, last) = (read(first)?, read(last)?);
        if first < 1024 || last < first || last - first < Self::FEWEST - 1 {
            return Err(allowed());
        }
        Ok(Self { first, last })
    }
}

impl std::fmt::Display for PortRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_and_written_alike() {
        for text in ["dir:/etc/manifests", "dir:rel/a:b", "kube"] {
            assert_eq!(
                text.parse::<SourceSpec>().map(|spec| spec.to_string()),
                Ok(text.to_owned())
            );
        }
        for text in ["", "dir", "dir:", "kube:", "file:/x", "/etc/manifests"] {
            assert!(text.parse::<SourceSpec>().is_err(), "{text}");
        }
    }

    #[test]
    fn node_port_addresses_are_words_or_blocks() {
        assert_eq!(parse_nodeport_addresses("primary"), Ok(NodePortAddresses::Primary));
        assert_eq!(parse_nodeport_addresses("all"), Ok(NodePortAddresses::All));
        let Ok(NodePortAddresses::Ranges(blocks)) = parse_nodeport_addresses("10.0.0.0/8, fd00::/8") else {
            panic!("two blocks");
        };
        assert!(blocks.iter().any(|block| block.contains([10, 1, 1, 1].into())));
        assert!(!blocks.iter().any(|block| block.contains([192, 0, 2, 1].into())));
        let error = parse_nodeport_addresses("secondary").expect_err("not a word");
        assert!(error.contains("primary, all"), "{error}");
    }

    #[test]
    fn the_cgroup2_mount_is_found_in_every_layout() {
        let hybrid = "25 20 0:22 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                      26 25 0:23 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw\n\
                      27 25 0:24 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        assert_eq!(cgroup2_in(hybrid), Some("/sys/fs/cgroup/unified".into()));
        let unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(cgroup2_in(unified), Some("/sys/fs/cgroup".into()));
        let part_first =
            "30 23 0:26 /kubepods /part rw - cgroup2 none rw\n31 23 0:26 / /a\\040b rw - cgroup2 none rw\n";
        assert_eq!(cgroup2_in(part_first), Some("/a b".into()));
        assert_eq!(
            cgroup2_in("27 25 0:24 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"),
            None
        );
        assert_eq!(cgroup2_in("garbage\n\n - \n"), None);
    }

    #[test]
    fn odd_values_are_refused_with_what_is_allowed() {
        assert!(parse_pin_name("evenkeel").is_ok());
        for text in ["", ".", "..", "a/b", "a b"] {
            assert!(parse_pin_name(text).is_err(), "{text}");
        }
        assert_eq!(parse_metrics_address("none"), Ok(None));
        assert!(parse_metrics_address("[::1]:9975").is_ok_and(|address| address.is_some()));
        assert!(parse_metrics_address("localhost:9975").is_err());
        assert_eq!(parse_horizon("0.5"), Err("allowed are 1 to 3600 (seconds)".to_owned()));
        assert!(parse_horizon("NaN").is_err());
        assert_eq!(parse_horizon("120"), Ok(Duration::from_mins(2)));
    }

    #[test]
    fn uplinks_are_auto_none_or_names() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let read = |given: &[&str], mode| Uplinks::from_words(&words(given), mode);
        assert_eq!(read(&[], Mode::Balance), Ok(Uplinks::Auto));
        assert_eq!(read(&[], Mode::Observe), Ok(Uplinks::None));
        assert_eq!(read(&["none"], Mode::Observe), Ok(Uplinks::None));
        assert_eq!(
            read(&["eth0", "eth0.7"], Mode::Balance),
            Ok(Uplinks::Named(words(&["eth0", "eth0.7"])))
        );
        for (given, mode, why) in [
            (&["auto"][..], Mode::Observe, "observe mode"),
            (&["eth0"], Mode::Observe, "observe mode"),
            (&["eth0", "auto"], Mode::Balance, "stands alone"),
            (&["a/b"], Mode::Balance, "no interface's name"),
            (&["a-name-that-is-too-long"], Mode::Balance, "no interface's name"),
        ] {
            let refused = read(given, mode).expect_err("not allowed");
            assert!(refused.contains(why), "{given:?}: {refused}");
        }
    }

    #[test]
    fn guests_are_names_or_beginnings() {
        let pattern = |text: &str| text.parse::<NamePattern>();
        assert!(pattern("tap0").is_ok_and(|p| p.matches("tap0") && !p.matches("tap01")));
        assert!(pattern("tap*").is_ok_and(|p| p.matches("tap") && p.matches("tap7") && !p.matches("vtap")));
        for text in ["", "*", "a b", "a*b", "**"] {
            assert!(pattern(text).is_err(), "{text}");
        }
    }

    #[test]
    fn source_ports_are_a_range_of_some_size() {
        let range = |text: &str| text.parse::<PortRange>();
        assert_eq!(
            range("10000-29999").map(|range| range.to_string()).as_deref(),
            Ok("10000-29999")
        );
        assert!(range("1024-1039").is_ok());
        for text in [
            "",
            "10000",
            "1023-2000",
            "29999-10000",
            "1024-1038",
            "60000-65536",
            "-",
            "a-b",
        ] {
            assert!(range(text).is_err(), "{text}");
        }
        let ports = PortRange { first: 100, last: 200 };
        assert!(ports.overlaps(&(200..=300)) && ports.overlaps(&(1..=100)) && ports.overlaps(&(120..=130)));
        assert!(!ports.overlaps(&(201..=300)) && !ports.overlaps(&(1..=99)));
    }

    #[test]
    fn interfaces_are_all_none_or_names() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let read = |given: &[&str], mode| Interfaces::from_words(&words(given), mode);
        assert_eq!(read(&[], Mode::Observe), Ok(Interfaces::All));
        assert_eq!(read(&[], Mode::Balance), Ok(Interfaces::None));
        assert_eq!(read(&["none"], Mode::Observe), Ok(Interfaces::None));
        assert_eq!(read(&["all"], Mode::Balance), Ok(Interfaces::All));
        let named = Interfaces::Named(words(&["eth0", "eth0.7"]));
        assert_eq!(read(&["eth0", "eth0.7"], Mode::Observe), Ok(named));
        let refused = read(&["eth0", "all"], Mode::Observe).expect_err("a word beside a name");
        assert!(refused.contains("`all` stands alone"), "{refused}");
    }
}
