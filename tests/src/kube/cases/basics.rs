//! Which Services are served, and at which ports.

use anyhow::Result;

use super::{Case, Stage};
use crate::kube::stage::From;

/// The cases.
pub const CASES: &[Case] = &[Case::e2e("serve_a_basic_endpoint", basic)];

fn basic(stage: &Stage<'_>) -> Result<String> {
    let pods = stage.pods(&[1, 2, 3])?;
    let service = stage.service(|_| {})?;
    let client = stage.client(1)?;
    for family in stage.families() {
        let all: Vec<_> = pods.iter().collect();
        stage.meets(&From::Pod(&client), service.cluster(*family)?, &all)?;
        stage.meets(&From::Node(3), service.cluster(*family)?, &all)?;
    }
    Ok("three pods, from a pod and from a node".to_owned())
}
