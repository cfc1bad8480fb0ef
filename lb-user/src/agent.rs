//! The daemon: joins the rooms and runs until it is told to stop.

use crate::config::Config;

/// Runs the agent until SIGTERM or SIGINT.
pub fn run(config: Config) -> anyhow::Result<()> {
    anyhow::bail!(
        "this build has no datapath: it cannot serve {} in {} mode",
        config.source,
        config.mode
    )
}
