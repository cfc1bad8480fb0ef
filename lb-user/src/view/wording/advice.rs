//! What to do about a finding, the most effective first.

use super::{Evenness, Findings, Starved, numbers::seconds};
use crate::{
    analysis::cause::{Cause, Fact},
    view::VerdictKind,
};

/// What to do, the most effective first; nothing where nothing is wrong.
pub fn advice(findings: &Findings) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut add = |text: String| {
        if !out.contains(&text) {
            out.push(text);
        }
    };
    for found in &findings.starved {
        for text in against(found, findings) {
            add(text);
        }
    }
    if findings.verdict == VerdictKind::Uneven {
        let alarm = |evenness: &Option<Evenness>| evenness.as_ref().is_some_and(|found| found.alarm);
        if alarm(&findings.new) {
            add(format!(
                "See how clients are kept where they are: `evenkeel reuse {}` shows source ports that are reused too soon, \
                 and `sessionAffinity: ClientIP` keeps each client on one endpoint.",
                findings.service
            ));
        } else if alarm(&findings.open) {
            add(SHORTER_LIVES.to_owned());
        }
    }
    out
}

fn against(found: &Starved, findings: &Findings) -> Vec<String> {
    let known = &findings.known;
    let proxy = known.proxy.as_deref().unwrap_or("the proxy");
    match found.cause {
        Cause::NotProgrammed => vec![format!(
            "Look at the logs of {proxy} on this node and at the age of its last sync: the endpoint is in the cluster's state \
             and not in its tables."
        )],
        Cause::PortReuse => port_reuse(found.facts.contains(&Fact::IpvsPinsReuse), findings),
        Cause::LongLived => vec![
            SHORTER_LIVES.to_owned(),
            "Or restart the clients a few at a time: each chooses again when it connects.".to_owned(),
        ],
        Cause::Affinity if found.facts.contains(&Fact::AffinityConfigured) => {
            let mut out = vec![
                "Set the Service's `sessionAffinity` to None, unless the application needs a client to stay."
                    .to_owned(),
            ];
            out.extend(known.affinity_seconds.map(|timeout| {
                format!(
                    "If it does, lower `sessionAffinityConfig.clientIP.timeoutSeconds` (now {timeout}, that is {}).",
                    seconds(f64::from(timeout))
                )
            }));
            out
        }
        Cause::Affinity => vec![format!(
            "Find what keeps clients on their endpoint, such as the scheduler of {proxy}: the Service itself asks for no \
             affinity."
        )],
        Cause::ZeroWeight => vec![format!(
            "If the endpoint should serve, give it a weight above 0 in the tables of {proxy}; if it is being drained, all is \
             as meant."
        )],
        Cause::Topology => vec![
            "If clients of this zone should reach it, turn off topology-aware routing of the Service \
             (`trafficDistribution`, or the annotation service.kubernetes.io/topology-mode); otherwise all is as meant."
                .to_owned(),
        ],
        Cause::Unknown => vec![
            format!(
                "Watch who still reaches it: `evenkeel observe -f {} --backend {}`.",
                findings.service, found.endpoint
            ),
            "Compare with what other nodes say: this one sees its own clients only.".to_owned(),
        ],
    }
}

fn port_reuse(ipvs_pins: bool, findings: &Findings) -> Vec<String> {
    let mut out = Vec::new();
    if ipvs_pins {
        out.push(
            "Set net.ipv4.vs.conn_reuse_mode to 1 on every node that translates for these clients (`sysctl -w \
             net.ipv4.vs.conn_reuse_mode=1`): a reused port is then a new choice. On kernels before 5.9 kube-proxy puts \
             it back to 0 when it starts."
                .to_owned(),
        );
    }
    out.push(
        "Let the clients keep their connections open and use them again (for nginx: `keepalive` in the upstream block): fewer \
         new connections reuse fewer ports."
            .to_owned(),
    );
    out.push(
        "Give the clients more source ports: a wider net.ipv4.ip_local_port_range in their network namespace, or more \
         client pods."
            .to_owned(),
    );
    if !findings.balanced_here {
        out.push(format!(
            "Or let Evenkeel balance {}: there a new connection is a new choice, whatever an old entry says.",
            findings.service
        ));
    }
    out
}

/// Said of load that stays where it is, because connections do.
const SHORTER_LIVES: &str = "Limit how long a connection lives, at the server (for nginx `keepalive_time` or \
    `keepalive_requests`, for gRPC a maximum connection age) or at the client: a connection stays where it began, and no \
    proxy moves it.";
