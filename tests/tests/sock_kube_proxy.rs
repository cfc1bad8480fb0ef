//! The real kube-proxy in each of its modes, and an agent on the same node: diagnosed, refused, taken over from, cleaned up after.
//!
//! kube-proxy follows the harness's API server in the node's namespace, the agent the same Services by manifests. Its IPVS mode
//! runs in the virtual machines, whose kernels have IPVS; they leave the other modes, in which no kernel differs, to this machine.

use std::{fs, process::ExitCode};

use anyhow::{Context, Result, ensure};
use lb_tests::{
    agent::{
        NODE_NAME, NODE_V4, NODE_V6, Node, trial, until,
        web::{BACKENDS, BACKENDS6, VIP, VIP6, serve_all, started, write_web},
    },
    apiserver::ApiServer,
    kube_proxy::{
        self, Mode,
        process::{self, Api, Settings},
    },
    objects::{cluster_ip, ready, service, slice, with},
    runner,
};
use lb_user::lab::{Child, server::Manner};
use serde_json::json;
use tokio::runtime::Runtime;

fn main() -> ExitCode {
    let modes = if runner::in_guest() {
        &[Mode::Ipvs][..]
    } else {
        &Mode::ALL
    };
    runner::run(
        modes
            .iter()
            .map(|mode| {
                let mode = *mode;
                let name = format!(
                    "the_real_kube_proxy_is_known_refused_and_taken_over_from::{}",
                    mode.name()
                );
                trial(&name, move |node| meet(node, mode))
            })
            .collect(),
    )
}

/// The real kube-proxy on a node, which it has programmed.
struct Real {
    process: Child,
    _api: ApiServer,
    _runtime: Runtime,
}

impl Real {
    fn start(node: &Node, mode: Mode) -> Result<Self> {
        let runtime = Runtime::new()?;
        let api = node.netns().run(|| runtime.block_on(ApiServer::start()))?;
        let addresses = [NODE_V4, NODE_V6].map(|address| json!({"type": "InternalIP", "address": address}));
        api.apply(json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": NODE_NAME}, "status": {"addresses": addresses},
        }));
        let web = service("web", cluster_ip(&["10.96.0.10", "fd00:96::10"]));
        // An API server fills this in; without it kube-proxy serves the first address alone.
        api.apply(with(&web, "/spec/ipFamilies", json!(["IPv4", "IPv6"])));
        for (name, addresses) in [("web-v4", &BACKENDS[..]), ("web-v6", &BACKENDS6)] {
            let endpoints: Vec<_> = addresses.iter().map(|address| ready(address)).collect();
            api.apply(slice(name, "web", &endpoints));
        }
        let url = api.url();
        let mut command = process::command(Settings {
            mode,
            at_once: true,
            node: NODE_NAME,
            api: Api::Url(&url),
            folder: node.folder(),
        })?;
        node.netns().place(&mut command);
        let log = node.folder().join("kube-proxy.log");
        let mut process = Child::start(&mut command, &log)?;
        until("kube-proxy to serve both families", || {
            if let Some(status) = process.ended()? {
                anyhow::bail!("it ended: {status}");
            }
            for vip in [VIP, VIP6] {
                node.dial(vip).with_context(|| format!("dial {vip}"))?;
            }
            Ok(())
        })
        .with_context(|| format!("kube-proxy said:\n{}", fs::read_to_string(&log).unwrap_or_default()))?;
        Ok(Self {
            process,
            _api: api,
            _runtime: runtime,
        })
    }
}

fn meet(node: &Node, mode: Mode) -> Result<()> {
    if let Some(reason) = process::missing(mode)? {
        return Err(runner::skip(reason));
    }
    write_web(node, &BACKENDS)?;
    // Its rules translate what is on its way; without a route nothing is, and without a proxy the namespace refuses.
    node.add_addresses(&["10.96.0.10", "fd00:96::10"])?;
    let _servers = serve_all(node, Manner::Greet)?;
    let mut real = Real::start(node, mode)?;

    kube_proxy::diagnosed(&kube_proxy::doctor(node, "balance")?, Some(mode), true).context("while it runs")?;
    let (code, said) = node.run_agent(&mut node.agent_command(&[]))?;
    kube_proxy::refused(code, &said, mode, true).context("while it runs")?;
    ensure!(!node.own_pins().exists(), "a refused agent pinned something");
    node.start(&["--mode", "observe"])?.stop()?;

    // Its programs come before kube-proxy's rules.
    let agent = node.start(&["--beside-kube-proxy"])?;
    let name = format!("kube-proxy ({}): ", mode.name());
    kube_proxy::wait_rivals(&agent, &[&name])?;
    for (vip, met) in [(VIP, BACKENDS.len()), (VIP6, BACKENDS6.len())] {
        let before = started(&agent)?;
        let found = node.dial_many(vip, 60)?;
        ensure!(found.len() == met, "{vip} met {found:?}");
        until("the connections to be counted", || {
            let counted = started(&agent)? - before;
            ensure!(counted == 60, "{counted} of 60 connections to {vip} were the agent's");
            Ok(())
        })?;
    }
    agent.stop()?;
    node.cleanup()?;

    // What it wrote stays in force without it.
    real.process.kill()?;
    node.dial(VIP).context("by what a killed kube-proxy left")?;
    kube_proxy::diagnosed(&kube_proxy::doctor(node, "balance")?, Some(mode), false).context("after it was killed")?;
    let (code, said) = node.run_agent(&mut node.agent_command(&[]))?;
    kube_proxy::refused(code, &said, mode, false).context("after it was killed")?;

    // The way out that the refusal names first.
    let mut cleanup = process::cleanup()?;
    node.netns().place(&mut cleanup);
    let output = cleanup.output().context("start kube-proxy --cleanup")?;
    kube_proxy::diagnosed(&kube_proxy::doctor(node, "balance")?, None, false).with_context(|| {
        format!(
            "after its cleanup, which said:\n{}",
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    ensure!(node.dial(VIP).is_err(), "somebody still translates {VIP}");
    let agent = node.start(&[])?;
    node.dial_many(VIP, 20)?;
    kube_proxy::wait_rivals(&agent, &[])?;
    agent.stop()
}
