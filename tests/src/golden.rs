//! The golden cases: small clusters as manifests, one folder in `golden/` a case.
//!
//! A folder holds the states of a cluster (`1.yaml`, `2.yaml`, ...), each one whole. The first line of `1.yaml` may set
//! options. What a test makes of a case stands in a text file of its own beside them; `EVENKEEL_BLESS=1` (or
//! `cargo xtask bless`) writes those files anew, and the difference is then to be read by a person.

use std::{
    fs,
    path::{Path, PathBuf},
};

use lb_user::{
    desired::{Config, NodePortAddresses},
    model::{Content, Kind, NodeAddresses, Object, Update},
    source::{convert::Names, dir::read_manifest},
};

/// The node on which every case plays.
pub const NODE: &str = "node-1";

/// The folder of all cases.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// The names of all cases, sorted.
///
/// # Panics
/// When the folder cannot be read.
pub fn cases() -> Vec<String> {
    let mut cases: Vec<String> = fs::read_dir(folder())
        .expect("the folder of cases")
        .map(|entry| entry.expect("an entry"))
        .filter(|entry| entry.path().join("1.yaml").exists())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    cases.sort();
    cases
}

/// The states of a case, in order: file name and text.
///
/// # Panics
/// When the case has none.
pub fn steps(case: &str) -> Vec<(String, String)> {
    let steps: Vec<(String, String)> = (1..)
        .map(|step| format!("{step}.yaml"))
        .map_while(|file| Some((file.clone(), fs::read_to_string(folder().join(case).join(&file)).ok()?)))
        .collect();
    assert!(!steps.is_empty(), "{case} has no 1.yaml");
    steps
}

/// The settings of a case: the words after `# options:` in its first line.
///
/// # Panics
/// When an option is not known.
pub fn configure(first: &str) -> (Config, NodeAddresses) {
    let mut config = Config {
        node_name: NODE.to_owned(),
        proxy_name: None,
        external_ips: true,
        node_port_addresses: NodePortAddresses::Primary,
        awaited: vec![Kind::Service, Kind::Slice, Kind::Node],
    };
    let mut host = NodeAddresses::default();
    let options = first
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("# options:"))
        .unwrap_or_default();
    for option in options.split_whitespace() {
        let (key, value) = option.split_once('=').expect("key=value");
        match key {
            "proxy-name" => config.proxy_name = Some(value.to_owned()),
            "external-ips" => config.external_ips = value == "on",
            "node-ports" => {
                config.node_port_addresses = match value {
                    "all" => NodePortAddresses::All,
                    "primary" => NodePortAddresses::Primary,
                    ranges => NodePortAddresses::Ranges(
                        ranges.split(',').map(|range| range.parse().expect("a range")).collect(),
                    ),
                }
            }
            "host" => host.addresses = value.split(',').map(|addr| addr.parse().expect("an address")).collect(),
            other => panic!("no option {other}"),
        }
    }
    (config, host)
}

/// What a source would say to bring a cluster to the state that a file holds.
///
/// # Panics
/// When the file is no YAML.
pub fn updates(file: &str, text: &str) -> Vec<Update> {
    let (objects, problems) = read_manifest(file, text.as_bytes(), &mut Names::default()).expect("valid YAML");
    let (mut services, mut slices, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
    for object in objects {
        match object {
            Object::Service(service) => services.push(service),
            Object::Slice(slice) => slices.push(slice),
            Object::Node(node) => nodes.push(node),
            // The kernel's state does not depend on them.
            Object::Pod(_) => {}
        }
    }
    let subject = "manifest".into();
    vec![
        Update::Replace(Content::Nodes(nodes)),
        Update::Replace(Content::Slices(slices)),
        Update::Replace(Content::Services(services)),
        Update::Problems { subject, problems },
    ]
}

/// Compares what a test says of a case with the file that says what it should; or writes that file.
///
/// # Panics
/// When they differ, or the file cannot be written.
pub fn compare(case: &str, file: &str, said: &str) {
    let path = folder().join(case).join(file);
    if std::env::var_os("EVENKEEL_BLESS").is_some_and(|bless| bless == "1") {
        fs::write(path, said).expect("the golden file is written");
        return;
    }
    let wanted = fs::read_to_string(path).unwrap_or_default();
    assert!(
        said == wanted,
        "{case} differs from its golden file {file}; wanted:\n{wanted}\nfound:\n{said}\n(cargo xtask bless writes it anew)"
    );
}
