//! The reference: nftables rules as kube-proxy writes them, in the client's namespace.

use std::{net::SocketAddr, time::Instant};

use anyhow::Result;

use super::stage;
use crate::{
    lab::{Netns, nft},
    model::Protocol,
};

/// The reference's rules and the endpoints that they have.
#[derive(Debug)]
pub(super) struct Rules {
    netns: Netns,
    web: nft::Service,
}

impl Rules {
    /// Loads the rules with three backends.
    pub(super) fn new(netns: &Netns) -> Result<Self> {
        let web = nft::Service {
            name: "default/web/tcp/http".to_owned(),
            frontend: stage::WEB,
            protocol: Protocol::Tcp,
            endpoints: stage::backends(3),
        };
        nft::load(netns, &nft::render_all(std::slice::from_ref(&web)))?;
        Ok(Self {
            netns: netns.clone(),
            web,
        })
    }

    /// Gives the Service other endpoints; returns when the change began and when it was in force.
    pub(super) fn set_endpoints(&mut self, backends: &[SocketAddr]) -> Result<(Instant, Instant)> {
        let new = nft::Service {
            endpoints: backends.to_vec(),
            ..self.web.clone()
        };
        let began = Instant::now();
        nft::load(&self.netns, &nft::render_change(&self.web, &new))?;
        self.web = new;
        Ok((began, Instant::now()))
    }
}
