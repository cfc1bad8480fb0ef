//! Whether a client's connections begin at a socket of this node, or come in as packets.

use std::net::IpAddr;

use lb_common::flow::{Interface, side};

use crate::{
    agent::{
        addresses,
        state::{Shared, lock},
    },
    node::route::{self, Way},
    view::Whence,
};

/// Where a flow is taken to begin.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    /// Where.
    pub(super) from: Whence,
    /// By what it was told, as a sentence; none where the question says so.
    pub(super) assumed: Option<String>,
    /// The interfaces where packets are translated: index, name, what the programs know of them.
    pub(super) interfaces: Vec<(u32, String, Interface)>,
}

impl Told {
    /// The interface that leads to an address, where packets are translated there.
    pub(super) fn leads(&self, address: IpAddr) -> Result<Option<&(u32, String, Interface)>, String> {
        match route::towards(address) {
            Ok(Way::By(index)) => Ok(self.interfaces.iter().find(|(known, ..)| *known == index)),
            Ok(Way::Local | Way::None) => Ok(None),
            Err(error) => Err(error.reason()),
        }
    }
}

/// Tells it by what the question says, or by the client's address.
pub(super) fn tell(shared: &Shared, client: IpAddr, said: Option<Whence>) -> Told {
    let mut told = Told {
        from: said.unwrap_or_default(),
        assumed: None,
        interfaces: shared.translated_interfaces(),
    };
    if said.is_some() {
        return told;
    }
    let (from, because) = assume(shared, &told, client.to_canonical());
    let taken = match from {
        Whence::Node => "a socket on this node",
        Whence::Outside => "a client outside",
        Whence::Guest => "a guest",
    };
    told.from = from;
    told.assumed = Some(format!("{client} {because}: taken for {taken} (--from says otherwise)"));
    told
}

fn assume(shared: &Shared, told: &Told, client: IpAddr) -> (Whence, String) {
    if addresses::read().is_ok_and(|own| own.addresses.contains(&client)) {
        return (Whence::Node, "is this node's own address".to_owned());
    }
    let leads = told.leads(client);
    if let Ok(Some((_, name, interface))) = &leads
        && interface.side == side::GUEST
    {
        return (Whence::Guest, format!("is reached by {name}, behind which guests are"));
    }
    if let Some(caller) = shared.directory.caller(client) {
        let pod = caller.workload().map_or_else(String::new, |name| format!(" of {name}"));
        return (Whence::Node, format!("is a Pod's address on this node{pod}"));
    }
    if told.interfaces.is_empty() {
        return (
            Whence::Node,
            "is not told from others, since no interface's packets are translated".to_owned(),
        );
    }
    match leads {
        Ok(Some((_, name, _))) => (Whence::Outside, format!("is reached by {name}, an uplink")),
        Ok(None) => match route::towards(client) {
            Ok(Way::None) => (Whence::Outside, "cannot be reached from here".to_owned()),
            _ => (Whence::Node, "is reached by no uplink".to_owned()),
        },
        Err(error) => (
            Whence::Outside,
            format!("is no address of this node or its Pods, and its route is not known ({error})"),
        ),
    }
}

impl Shared {
    /// The names of the interfaces where packets are translated, by index.
    pub(in crate::agent) fn interface_names(&self) -> Vec<(u32, String)> {
        let views = lock(&self.uplinks).views();
        (views.into_iter())
            .filter_map(|view| Some((view.index?, view.name)))
            .collect()
    }

    /// The interfaces where packets are translated, as the programs know them.
    pub(in crate::agent) fn translated_interfaces(&self) -> Vec<(u32, String, Interface)> {
        let names = self.interface_names();
        let reconciler = lock(&self.reconciler);
        let known = reconciler.kernel().flows().interfaces().unwrap_or_default();
        known
            .into_iter()
            .map(|(index, interface)| {
                let named = names.iter().find(|(found, _)| *found == index);
                let name = named.map_or_else(|| format!("interface {index}"), |(_, name)| name.clone());
                (index, name, interface)
            })
            .collect()
    }
}
