//! What the node itself says of IPVS: evidence that is read, on a kernel that has it.

use std::{collections::HashSet, net::SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use lb_user::{
    lab::{
        client::{Client, Load},
        mounts::BpfFs,
    },
    model::Protocol,
    node::{
        inventory,
        ipvs::{self, Timeouts},
        proxy::{Kind, Proxy},
        settings::{self, Setting},
        table::{Finding, Table},
    },
};

use super::{
    ipvs::Ipvs,
    reach,
    stage::{self, Stage},
};

/// Proxy, table, timeouts and settings are those that the test has made.
pub(crate) fn the_node_says_what_ipvs_has(bpf: &BpfFs) -> Result<()> {
    let stage = Stage::new()?;
    let pins = bpf.folder("facts")?;
    let frontends = HashSet::from([stage::WEB]);
    let look = || -> Result<(Proxy, Table, Vec<Setting>, Timeouts)> {
        let (proxy, table, settings, timeouts) = stage.node.run(|| {
            let proxy = Proxy::find(&pins, &frontends);
            let table = Table::read(&proxy);
            let settings = settings::read(proxy.kind);
            (proxy, table, settings, ipvs::timeouts())
        })?;
        Ok((proxy, table, settings, timeouts?.context("IPVS is loaded")?))
    };
    let (proxy, ..) = look()?;
    ensure!(
        proxy.kind == Kind::Unseen,
        "before there is a virtual server: {proxy:?}"
    );

    let ipvs = Ipvs::new(&stage.node, stage::WEB, 0)?;
    ipvs.add_weighted(stage::backend(1), 3)?;
    ipvs.add_weighted(stage::backend(2), 1)?;
    let client = Client::start(
        &stage.node,
        &Load {
            total: Some(40),
            ..Load::tcp(stage::WEB)
        },
    )?;
    reach(&client, 40)?;
    ipvs.set_weight(stage::backend(2), 0)?;

    let (proxy, table, settings, timeouts) = look()?;
    ensure!(proxy.kind == Kind::Ipvs && proxy.unseen.is_empty(), "{proxy:?}");
    let (first, second) = (weight_and_entries(&table, 1)?, weight_and_entries(&table, 2)?);
    ensure!(first.0 == 3 && second.0 == 0, "weights: {table:?}");
    // A port that comes back meets its entry, so that there are no more entries than connections, and half as many at least.
    ensure!(first.1 > 0 && second.1 > 0, "both got connections: {table:?}");
    ensure!(
        (20..=40).contains(&(first.1 + second.1)),
        "entries of 40 connections: {table:?}"
    );
    let third = table.find(stage::WEB, Protocol::Tcp, stage::backend(3));
    ensure!(matches!(third, Finding::Absent { service: Some(_) }), "{third:?}");
    let service = table.service(stage::WEB, Protocol::Tcp).context("the virtual server")?;
    ensure!(service.scheduler.as_deref() == Some("rr"), "{service:?}");

    let setting = |name: &str| settings.iter().find(|s| s.name == name).context(name.to_owned());
    let reuse = setting("net.ipv4.vs.conn_reuse_mode")?;
    ensure!(
        reuse.value.as_deref() == Some("0") && reuse.advice.is_some(),
        "{reuse:?}"
    );
    ensure!(timeouts.tcp_fin.as_secs() == 120, "{timeouts:?}");
    let fin = setting("ipvs.timeout.tcpfin")?;
    ensure!(fin.value.as_deref() == Some("120"), "{fin:?}");
    let ports = setting("net.ipv4.ip_local_port_range")?;
    ensure!(
        ports.advice.as_ref().is_some_and(|text| text.contains("200 ports")),
        "{ports:?}"
    );
    // Each connection was closed by the server at once.
    let open = stage.node.run(|| inventory::open_connections(&frontends))??;
    ensure!(open.is_empty(), "{open:?}");
    Ok(())
}

fn weight_and_entries(table: &Table, backend: u8) -> Result<(u32, u64)> {
    let endpoint: SocketAddr = stage::backend(backend);
    match table.find(stage::WEB, Protocol::Tcp, endpoint) {
        Finding::Programmed { backend, .. } => {
            let entries = backend.active.zip(backend.inactive).context("counts")?;
            Ok((backend.weight.context("a weight")?, entries.0 + entries.1))
        }
        other => bail!("{endpoint}: {other:?}"),
    }
}
