//! `evenkeel agent`: the daemon's flags.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::PathBuf,
    time::Duration,
};

use clap::{Args, ValueEnum};

use super::{Failure, Found};
use crate::config::{
    self, Config, Interfaces, Limits, LogFormat, LogLevel, Mode, NamePattern, NodePortAddresses, PortRange, SourceSpec,
    Uplinks, parse_horizon, parse_metrics_address, parse_nodeport_addresses, parse_pin_name,
};

/// Run the agent: keep the kernel in step with the source, and watch
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    evenkeel agent --source dir:/etc/evenkeel/manifests\n  \
    evenkeel agent --source kube --mode observe --interface eth0\n  \
    evenkeel agent --source kube --uplink eth0,eth0.7 --guest-interface 'tap*'\n  \
    EVENKEEL_SOURCE=kube EVENKEEL_METRICS_ADDRESS=0.0.0.0:9975 evenkeel agent")]
pub(super) struct AgentArgs {
    /// Where Services and EndpointSlices come from: dir:PATH (a folder of manifests, watched) or kube (the API server)
    #[arg(long, env = "EVENKEEL_SOURCE", value_name = "dir:PATH|kube")]
    source: SourceSpec,
    /// Whether to translate connections, or only to watch them
    #[arg(long, env = "EVENKEEL_MODE", value_enum, default_value_t = ModeArg::Balance)]
    mode: ModeArg,
    /// The cgroup v2 directory to attach to [default: the root of the mounted cgroup2 hierarchy]
    #[arg(long, env = "EVENKEEL_CGROUP", value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// The BPF file system
    #[arg(long, env = "EVENKEEL_BPFFS", value_name = "PATH", default_value = "/sys/fs/bpf")]
    bpffs: PathBuf,
    /// The folder of the pins under the BPF file system
    #[arg(long, env = "EVENKEEL_PIN_NAME", value_name = "NAME", default_value = "evenkeel", value_parser = parse_pin_name)]
    pin_name: String,
    /// This node's name, as EndpointSlices name it [default: the host's name in lower case]
    #[arg(long, env = "EVENKEEL_NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// Which of the node's addresses serve node ports: primary, all, or those within the blocks given
    #[arg(long, env = "EVENKEEL_NODEPORT_ADDRESSES", value_name = "primary|all|CIDR,..", default_value = "primary",
          value_parser = parse_nodeport_addresses)]
    nodeport_addresses: NodePortAddresses,
    /// An address of this node, given instead of discovered (repeatable)
    #[arg(
        long = "node-address",
        env = "EVENKEEL_NODE_ADDRESS",
        value_name = "ADDR",
        value_delimiter = ','
    )]
    node_addresses: Vec<IpAddr>,
    /// Interfaces whose packets tell the backend that another proxy chose, and the connections that pass through: `all`,
    /// `none`, or names (repeatable); by default all in observe mode, none in balance mode
    #[arg(
        long = "interface",
        env = "EVENKEEL_INTERFACE",
        value_name = "NAME",
        value_delimiter = ','
    )]
    interfaces: Vec<String>,
    /// Interfaces that lead out of the node, where packets from outside are translated: `auto`, `none`, or names (repeatable). By
    /// default auto in balance mode: those that are up, no port of a bridge or bond, and carry an address of the node or a default
    /// route, or are network cards with an address, or tunnels; what ceases to be so stays one for a minute. In observe mode none:
    /// it translates nothing
    #[arg(
        long = "uplink",
        env = "EVENKEEL_UPLINK",
        value_name = "auto|none|NAME",
        value_delimiter = ','
    )]
    uplinks: Vec<String>,
    /// Interfaces with guests of their own kernel behind them, such as virtual machines, whose packets are translated like those of
    /// this node's own clients: names, or beginnings of names with `*` behind them (repeatable)
    #[arg(
        long = "guest-interface",
        env = "EVENKEEL_GUEST_INTERFACE",
        value_name = "NAME|PREFIX*",
        value_delimiter = ','
    )]
    guests: Vec<NamePattern>,
    /// The node's own source ports towards backends on other nodes; they should lie outside of net.ipv4.ip_local_port_range and of
    /// the node ports
    #[arg(
        long,
        env = "EVENKEEL_SNAT_PORTS",
        value_name = "FIRST-LAST",
        default_value_t = PortRange::default()
    )]
    snat_ports: PortRange,
    /// A cgroup whose sockets keep the addresses that they dial (repeatable)
    #[arg(
        long = "opt-out-cgroup",
        env = "EVENKEEL_OPT_OUT_CGROUP",
        value_name = "PATH",
        value_delimiter = ','
    )]
    opt_out_cgroups: Vec<PathBuf>,
    /// Where to serve /metrics, /healthz, /livez and /readyz; `none` serves nothing
    #[arg(long, env = "EVENKEEL_METRICS_ADDRESS", value_name = "ADDR:PORT|none", default_value = "127.0.0.1:9975",
          value_parser = MetricsAddress::parse)]
    metrics_address: MetricsAddress,
    /// Whether to serve spec.externalIPs
    #[arg(long, env = "EVENKEEL_EXTERNAL_IPS", value_name = "true|false", default_value_t = true, action = clap::ArgAction::Set)]
    external_ips: bool,
    /// Serve the Services with this label service.kubernetes.io/service-proxy-name [default: those without the label]
    #[arg(long, env = "EVENKEEL_PROXY_NAME", value_name = "NAME")]
    proxy_name: Option<String>,
    /// The longest interval that counts as tuple reuse
    #[arg(long, env = "EVENKEEL_REUSE_HORIZON", value_name = "SECONDS", default_value = "120", value_parser = parse_horizon)]
    reuse_horizon: Duration,
    /// The kubeconfig for `--source kube` [default: the pod's own account, else the usual places]
    #[arg(long, env = "EVENKEEL_KUBECONFIG", value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
    /// The API server's address, where neither a kubeconfig nor the pod's own account is to be used
    #[arg(long, env = "EVENKEEL_KUBE_URL", value_name = "URL", conflicts_with = "kubeconfig")]
    kube_url: Option<String>,
    /// How log lines look
    #[arg(long, env = "EVENKEEL_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
    /// Which log lines are written
    #[arg(long, env = "EVENKEEL_LOG_LEVEL", value_enum, default_value_t = LogLevel::Info)]
    log_level: LogLevel,
    /// Frontends that fit into the kernel's maps
    #[arg(long, env = "EVENKEEL_MAX_FRONTENDS", value_name = "N", default_value_t = entries(lb_common::maps::MAX_FRONTENDS),
          value_parser = parse_entries)]
    max_frontends: NonZeroU32,
    /// Backends that fit into the kernel's maps
    #[arg(long, env = "EVENKEEL_MAX_BACKENDS", value_name = "N", default_value_t = entries(lb_common::maps::MAX_BACKENDS),
          value_parser = parse_entries)]
    max_backends: NonZeroU32,
    /// Sockets of each kind whose dialled address is remembered
    #[arg(long, env = "EVENKEEL_MAX_SOCKETS", value_name = "N", default_value_t = entries(lb_common::maps::MAX_SOCKETS),
          value_parser = parse_entries)]
    max_sockets: NonZeroU32,
    /// Flows of translated packets that fit into the kernel's maps (some 400 bytes each)
    #[arg(long, env = "EVENKEEL_MAX_FLOWS", value_name = "N", default_value_t = entries(lb_common::maps::MAX_FLOWS),
          value_parser = parse_entries)]
    max_flows: NonZeroU32,
    /// Give every backend its own metric series
    #[arg(long, env = "EVENKEEL_BACKEND_METRICS")]
    backend_metrics: bool,
    /// Serve kube-proxy's own metrics beside Evenkeel's, by their names and with this agent's numbers, so that dashboards and alerts
    /// for kube-proxy go on (balance mode)
    #[arg(long, env = "EVENKEEL_KUBE_PROXY_METRICS")]
    kube_proxy_metrics: bool,
    /// Balance though kube-proxy runs here or has left rules in force, to take over from it without a gap; end it and remove its rules
    /// soon after (balance mode)
    #[arg(long, env = "EVENKEEL_BESIDE_KUBE_PROXY")]
    beside_kube_proxy: bool,
}

/// The values of `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ModeArg {
    /// Translate frontends to backends.
    Balance,
    /// Only watch: attach no program that writes to traffic.
    Observe,
}

/// A clap value cannot itself be an `Option`: that would mean an optional flag.
#[derive(Clone, Copy, Debug)]
struct MetricsAddress(Option<SocketAddr>);

impl MetricsAddress {
    fn parse(text: &str) -> Result<Self, String> {
        parse_metrics_address(text).map(Self)
    }
}

/// The largest map size that is taken: beyond it the kernel's memory is at stake, not a need.
const MAX_ENTRIES: u32 = 1 << 24;

const fn entries(default: u32) -> NonZeroU32 {
    match NonZeroU32::new(default) {
        Some(entries) => entries,
        None => NonZeroU32::MIN,
    }
}

fn parse_entries(text: &str) -> Result<NonZeroU32, String> {
    text.parse::<NonZeroU32>()
        .ok()
        .filter(|entries| entries.get() <= MAX_ENTRIES)
        .ok_or_else(|| format!("allowed are 1 to {MAX_ENTRIES}"))
}

impl AgentArgs {
    fn into_config(self, socket: PathBuf) -> Result<Config, Failure> {
        let cgroup = match self.cgroup {
            Some(path) => path,
            None => config::cgroup2_root().map_err(|error| Failure::Other(error.into()))?,
        };
        for (flag, path) in [("--cgroup", &cgroup)]
            .into_iter()
            .chain(self.opt_out_cgroups.iter().map(|path| ("--opt-out-cgroup", path)))
        {
            match config::is_cgroup2(path) {
                Ok(true) if path.is_dir() => {}
                Ok(_) => {
                    return Err(not_allowed(
                        flag,
                        path,
                        "allowed is a directory on a cgroup v2 file system",
                    ));
                }
                Err(error) => return Err(not_allowed(flag, path, &error.to_string())),
            }
        }
        if let SourceSpec::Dir(path) = &self.source
            && !path.is_dir()
        {
            return Err(not_allowed(
                "--source dir:PATH",
                path,
                "allowed is a folder that exists",
            ));
        }
        let node_name = match self.node_name {
            Some(name) => name,
            None => nix::unistd::gethostname()
                .map_err(|error| Failure::Other(anyhow::Error::from(error).context("the host's name")))?
                .to_string_lossy()
                .to_lowercase(),
        };
        let mode = match self.mode {
            ModeArg::Balance => Mode::Balance,
            ModeArg::Observe => Mode::Observe,
        };
        let interfaces = Interfaces::from_words(&self.interfaces, mode)
            .map_err(|error| Failure::Usage(format!("--interface: {error}")))?;
        let uplinks =
            Uplinks::from_words(&self.uplinks, mode).map_err(|error| Failure::Usage(format!("--uplink: {error}")))?;
        if mode == Mode::Observe && !self.guests.is_empty() {
            return Err(Failure::Usage(
                "--guest-interface: observe mode translates nothing; leave the flag out".to_owned(),
            ));
        }
        for (flag, given) in [
            ("--kube-proxy-metrics", self.kube_proxy_metrics),
            (crate::doctor::owners::BESIDE, self.beside_kube_proxy),
        ] {
            if given && mode == Mode::Observe {
                return Err(Failure::Usage(format!(
                    "{flag}: observe mode takes nothing over from kube-proxy; leave the flag out"
                )));
            }
        }
        Ok(Config {
            source: self.source,
            mode,
            cgroup,
            bpffs: self.bpffs,
            pin_name: self.pin_name,
            node_name,
            nodeport_addresses: self.nodeport_addresses,
            node_addresses: self.node_addresses,
            interfaces,
            uplinks,
            guests: self.guests,
            snat_ports: self.snat_ports,
            opt_out_cgroups: self.opt_out_cgroups,
            metrics_address: self.metrics_address.0,
            socket,
            external_ips: self.external_ips,
            proxy_name: self.proxy_name,
            reuse_horizon: self.reuse_horizon,
            kubeconfig: self.kubeconfig,
            kube_url: self.kube_url,
            log_format: self.log_format,
            log_level: self.log_level,
            limits: Limits {
                frontends: self.max_frontends,
                backends: self.max_backends,
                sockets: self.max_sockets,
                flows: self.max_flows,
            },
            backend_metrics: self.backend_metrics,
            kube_proxy_metrics: self.kube_proxy_metrics,
            beside_kube_proxy: self.beside_kube_proxy,
        })
    }
}

fn not_allowed(flag: &str, path: &std::path::Path, why: &str) -> Failure {
    Failure::Usage(format!("{flag}: `{}`: {why}", path.display()))
}

pub(super) fn run(args: AgentArgs, socket: PathBuf) -> Result<Found, Failure> {
    crate::agent::run(args.into_config(socket)?)?;
    Ok(Found::Fine)
}
