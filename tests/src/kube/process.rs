//! What a pod of the lab runs: a process of its own that serves until it is killed.
//!
//! SIGTERM changes nothing: the pod serves on through its grace, as an application that drains does. With `--end-on-term` it ends
//! at once, as one that does not care.

use std::{io::Write as _, net::IpAddr, time::Duration};

use anyhow::Result;
use clap::Args;
use lb_user::lab::Netns;

use crate::{interrupt, lab::serve::Serving};

/// The verb by which this program becomes a Pod's process.
pub const POD: &str = "pod";
/// The line by which the process says that it serves.
pub const SERVING: &str = "serving";

/// How a pod's process is started.
#[derive(Debug, Args)]
pub struct PodArgs {
    /// The pod's name, which its servers say
    #[arg(long)]
    name: String,
    /// An address of the pod
    #[arg(long = "address", required = true)]
    addresses: Vec<IpAddr>,
    /// End at SIGTERM instead of serving on
    #[arg(long)]
    end_on_term: bool,
}

/// Serves until a signal ends the process.
///
/// # Errors
/// Where an address cannot be bound.
pub fn run(args: &PodArgs) -> Result<()> {
    interrupt::catch()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let _serving = Serving::start(runtime.handle(), &Netns::current()?, &args.name, &args.addresses)?;
    writeln!(std::io::stdout(), "{SERVING}")?;
    runtime.block_on(async {
        loop {
            // Not a wait for anything: how often a signal is looked for.
            tokio::time::sleep(Duration::from_millis(20)).await;
            if args.end_on_term && interrupt::check().is_err() {
                return;
            }
        }
    });
    Ok(())
}
