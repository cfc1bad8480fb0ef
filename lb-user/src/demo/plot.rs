//! The acts: what happens while the client connects.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    act::{Added, Change, Script, evaluate, millis},
    agent::Agent,
    outcome::{Act, Reuse},
    progress::Progress,
    reference::Rules,
    stage::{self, Stage},
};
use crate::{
    interrupt::Interrupts,
    lab::client::{Client, Load, Way},
};

/// Connections a second of the TCP acts.
const RATE: f64 = 4_000.0;
/// Requests a second, and requests on sockets of each kind, of the UDP act.
const UDP_RATE: f64 = 1_500.0;
const UDP_REQUESTS: u64 = 1_500;
/// The backend that leaves, and comes back after the agent's death.
const LEAVER: u8 = 2;

/// What one arm needs to play.
#[derive(Debug)]
pub(super) struct Plot<'a> {
    pub(super) stage: &'a mut Stage,
    pub(super) interrupts: &'a Interrupts,
    pub(super) progress: &'a mut Progress,
    /// Connections of the steady act.
    pub(super) connections: u64,
}

/// What spreads connections over backends and can be given others.
trait Balancer {
    /// How progress lines name it.
    const NAME: &'static str;
    /// Gives the web Service these backends and waits until that is in force.
    fn change(&mut self, backends: &[SocketAddr]) -> Result<Change>;
    /// Reuse counted so far, if it counts.
    fn reuse(&mut self) -> Result<Option<Reuse>>;
}

impl Balancer for Agent<'_> {
    const NAME: &'static str = "evenkeel";

    fn change(&mut self, backends: &[SocketAddr]) -> Result<Change> {
        let made = self.set_endpoints(backends)?;
        let reported = self.wait_programmed(backends)?;
        Ok(Change { made, reported })
    }

    fn reuse(&mut self) -> Result<Option<Reuse>> {
        self.read_reuse().map(Some)
    }
}

impl Balancer for Rules {
    const NAME: &'static str = "reference: nftables";

    fn change(&mut self, backends: &[SocketAddr]) -> Result<Change> {
        let (made, reported) = self.set_endpoints(backends)?;
        Ok(Change { made, reported })
    }

    fn reuse(&mut self) -> Result<Option<Reuse>> {
        Ok(None)
    }
}

impl Plot<'_> {
    /// Plays all acts with the agent.
    pub(super) fn play_agent(mut self, agent: &mut Agent<'_>) -> Result<Vec<Act>> {
        let mut acts = self.play_shared(agent)?;
        acts.push(self.counted(agent, Self::agent_killed)?);
        acts.push(self.counted(agent, |plot, _| plot.udp())?);
        Ok(acts)
    }

    /// Plays the acts that the reference takes part in.
    pub(super) fn play_reference(mut self, rules: &mut Rules) -> Result<Vec<Act>> {
        self.play_shared(rules)
    }

    fn play_shared<B: Balancer>(&mut self, balancer: &mut B) -> Result<Vec<Act>> {
        Ok(vec![
            self.counted(balancer, |plot, _| plot.steady(B::NAME))?,
            self.counted(balancer, Self::scale_out)?,
            self.counted(balancer, Self::backend_removed)?,
        ])
    }

    /// Plays an act and adds what was counted of reuse meanwhile.
    fn counted<B: Balancer>(
        &mut self,
        balancer: &mut B,
        play: impl FnOnce(&mut Self, &mut B) -> Result<Act>,
    ) -> Result<Act> {
        let before = balancer.reuse()?;
        let mut act = play(self, balancer)?;
        // What happened last is on its way to the agent; a report of an act may miss a moment of it, the total does not.
        self.interrupts.pass(Duration::from_millis(200))?;
        act.reuse = balancer
            .reuse()?
            .zip(before)
            .map(|(after, before)| after.since(&before));
        Ok(act)
    }

    fn steady(&mut self, balancer: &str) -> Result<Act> {
        let title = format!("{balancer}, steady: 3 backends");
        let load = Load {
            total: Some(self.connections),
            rate: Some(RATE),
            ..Load::tcp(stage::WEB)
        };
        let client = self.begin(&title, &load)?;
        self.until_finished(&title, &client)?;
        let script = Script {
            members: stage::backends(3),
            ..Script::default()
        };
        Ok(evaluate("steady", &client.wait(), &script))
    }

    fn scale_out<B: Balancer>(&mut self, balancer: &mut B) -> Result<Act> {
        let title = format!("{}, scale-out: 3 to 6 backends while connecting", B::NAME);
        let client = self.begin(&title, &endless())?;
        self.watch(&title, &client, Duration::from_secs(1))?;
        let all = stage::backends(6);
        let change = balancer.change(&all)?;
        self.watch(&title, &client, Duration::from_secs(3))?;
        let attempts = client.stop();
        let new = all[3..].to_vec();
        let (ready, _) = change.ready(&new, &attempts);
        let script = Script {
            members: all.clone(),
            even: (Some(ready), None),
            added: Some((change, Added { new, all })),
            ..Script::default()
        };
        Ok(evaluate("scale_out", &attempts, &script))
    }

    fn backend_removed<B: Balancer>(&mut self, balancer: &mut B) -> Result<Act> {
        let title = format!("{}, one of 6 backends removed while connecting", B::NAME);
        let client = self.begin(&title, &endless())?;
        self.watch(&title, &client, Duration::from_secs(1))?;
        let leaver = stage::backend(LEAVER);
        let rest = without(&stage::backends(6), leaver);
        let change = balancer.change(&rest)?;
        // As a pod does that is told to end: it serves on for a moment, then its port refuses.
        self.watch(&title, &client, Duration::from_millis(300))?;
        self.stage.stop_server(leaver);
        self.watch(&title, &client, Duration::from_millis(1_700))?;
        let script = Script {
            members: rest,
            even: (Some(change.reported), None),
            removed: Some((change, leaver)),
            ..Script::default()
        };
        Ok(evaluate("backend_removed", &client.stop(), &script))
    }

    fn agent_killed(&mut self, agent: &mut Agent<'_>) -> Result<Act> {
        let title = "evenkeel, agent killed and started again while connecting";
        let leaver = stage::backend(LEAVER);
        self.stage.start_server(leaver)?;
        let client = self.begin(title, &endless())?;
        self.watch(title, &client, Duration::from_secs(1))?;
        agent.kill()?;
        self.watch(title, &client, Duration::from_millis(1_500))?;
        let starting = Instant::now();
        agent.restart()?;
        let restarted = starting.elapsed();
        self.watch(title, &client, Duration::from_millis(500))?;
        // That it is back shows in what it does: the backend that left returns and must get its share.
        let all = stage::backends(6);
        let change = agent.change(&all)?;
        self.watch(title, &client, Duration::from_secs(2))?;
        let script = Script {
            members: without(&all, leaver),
            even: (None, Some(change.made)),
            added: Some((change, Added { new: vec![leaver], all })),
            ..Script::default()
        };
        let act = evaluate("agent_killed", &client.stop(), &script);
        Ok(Act {
            restart_ms: Some(millis(restarted)),
            ..act
        })
    }

    fn udp(&mut self) -> Result<Act> {
        let title = "evenkeel, UDP: a request and an answer on new sockets";
        let mut attempts = Vec::new();
        for way in [Way::UdpConnected, Way::UdpUnconnected] {
            let load = Load {
                way,
                total: Some(UDP_REQUESTS),
                rate: Some(UDP_RATE),
                ..Load::tcp(stage::NAMES)
            };
            let client = self.begin(title, &load)?;
            self.until_finished(title, &client)?;
            attempts.extend(client.wait());
        }
        let members = stage::backends(stage::BACKENDS);
        let script = Script {
            members: members
                .iter()
                .map(|b| SocketAddr::new(b.ip(), stage::NAMES_TARGET))
                .collect(),
            ..Script::default()
        };
        Ok(evaluate("udp", &attempts, &script))
    }

    fn begin(&mut self, title: &str, load: &Load) -> Result<Client> {
        self.progress.say(title);
        Ok(Client::start(&self.stage.client, load)?)
    }

    fn until_finished(&mut self, title: &str, client: &Client) -> Result<()> {
        while !client.is_finished() {
            self.watch(title, client, Duration::from_millis(50))?;
        }
        Ok(())
    }

    fn watch(&mut self, title: &str, client: &Client, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            self.interrupts.pass(left.min(Duration::from_millis(100)))?;
            self.progress.count(title, client.made(), client.failed());
        }
        Ok(())
    }
}

/// A client that goes on until it is stopped.
fn endless() -> Load {
    Load {
        rate: Some(RATE),
        ..Load::tcp(stage::WEB)
    }
}

fn without(backends: &[SocketAddr], leaver: SocketAddr) -> Vec<SocketAddr> {
    backends.iter().copied().filter(|&b| b != leaver).collect()
}
