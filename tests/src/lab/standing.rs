//! The lab that stands until it is taken down.

use anyhow::Result;
use lb_user::lab::mounts::BpfFs;
use serde_json::{Map, Value, json};

use super::Lab;
use crate::{
    command_line::say,
    interrupt,
    standing::{Place, Standing, names},
};

pub use crate::standing::HOLD;

/// What stands.
pub const STANDING: Standing = Standing {
    name: "lab",
    socket: "/run/evenkeel-lab.sock",
    log: "evenkeel-lab.log",
    task: "cargo xtask lab",
};

/// Builds a lab that stands, and says where everything is.
///
/// # Errors
/// Where one stands already or cannot be built.
pub fn up() -> Result<()> {
    say(&describe(&STANDING.up()?));
    Ok(())
}

/// Holds a lab until it is asked to let go, or a signal comes.
///
/// # Errors
/// Where the lab cannot be built.
pub fn hold() -> Result<()> {
    interrupt::catch()?;
    let _mounts = BpfFs::enter_private()?;
    let lab = Lab::new()?;
    lab.start_agents()?;
    let places: Vec<Place> = lab
        .places()
        .into_iter()
        .map(|(name, node, netns)| {
            let node = node.map(|number| lab.node(number));
            Place {
                name,
                netns: netns.clone(),
                cgroup: node.map(|node| node.cgroup().path().to_owned()),
                environment: node
                    .map(|node| ("EVENKEEL_SOCKET", node.socket().display().to_string()))
                    .into_iter()
                    .collect(),
            }
        })
        .collect();
    let mut further = Map::new();
    further.insert("manifests".to_owned(), json!(lab.manifests().path()));
    further.insert("folder".to_owned(), json!(lab.folder()));
    STANDING.serve(lab, &places, further, |_| json!("it stands"))
}

fn describe(places: &Value) -> String {
    let manifests = places["manifests"].as_str().unwrap_or_default();
    format!(
        "The lab stands. Its places: {}.\n\
         Run a command in one:      cargo xtask lab exec client -- ip address\n\
         Ask an agent:              cargo xtask lab exec node-1 -- evenkeel status\n\
         Give the agents Services:  write manifests into {manifests}\n\
         Take it down:              cargo xtask lab down",
        names(places).join(", ")
    )
}
