//! What happens in a schedule: pure, the same for a seed.

use std::{fmt, time::Duration};

use crate::model::Dice;

/// The Services that come and go.
pub(super) const SERVICES: usize = 4;
/// The Pods that are their endpoints.
pub(super) const PODS: usize = 4;

/// The kinds of faults that take some seconds at most: an expired token is remembered for ten.
const QUICK: [usize; 11] = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11];

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The API server is killed and started again; where its history is gone by then, no node reaches it before all has changed.
    KillServer {
        /// Whether etcd forgets its history meanwhile.
        compact: bool,
    },
    /// The API server stands still for so many milliseconds.
    FreezeServer(u64),
    /// A node cannot reach the API server for so many milliseconds, and nobody tells it so.
    CutOff(u8, u64),
    /// Every connection of the agents to the API server is reset.
    Disconnect,
    /// The API server gets a new certificate, and the connections are reset.
    RotateCertificate,
    /// The agents' token is replaced, and the connections are reset.
    RotateToken,
    /// The agents' token is no longer good; a new one comes later.
    ExpireToken,
    /// Nobody knows the API server's name, and the connections are reset.
    LoseNames,
    /// The same for so many milliseconds, while a node's agent is killed and begins again.
    BeginWithoutNames(u8, u64),
    /// The agents may read nothing, and the connections are reset.
    RevokeRights,
    /// A node's agent is killed.
    KillAgent(u8),
    /// A node starts anew: no pins, no agent, its Pods begin again.
    RebootNode(u8),
}

impl Fault {
    /// How much later than otherwise agents may be up to date. What was sent while packets were swallowed is sent again by the API
    /// server's kernel alone, whose waits double: the next may come as late as the outage was long (ADR 0016).
    pub const fn allowance(self) -> Duration {
        match self {
            Self::CutOff(_, milliseconds) => Duration::from_millis(milliseconds),
            _ => Duration::ZERO,
        }
    }

    /// The kind's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::KillServer { compact: false } => "API server killed",
            Self::KillServer { compact: true } => "API server killed and history compacted",
            Self::FreezeServer(_) => "API server frozen",
            Self::CutOff(..) => "node cut off",
            Self::Disconnect => "connections reset",
            Self::RotateCertificate => "serving certificate rotated",
            Self::RotateToken => "token rotated",
            Self::ExpireToken => "token expired",
            Self::LoseNames => "name lookup failing",
            Self::BeginWithoutNames(..) => "name lookup failing for long, and an agent begins",
            Self::RevokeRights => "rights taken away",
            Self::KillAgent(_) => "agent killed",
            Self::RebootNode(_) => "node rebooted",
        }
    }
}

/// Something that changes in the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A Service comes, with Pods by chance.
    Create(usize),
    /// A Service goes with its slices.
    Delete(usize),
    /// A Service goes and comes again, with the same address and other Pods.
    Recreate(usize),
    /// A Service's endpoints are other ones, in other states; the number decides.
    Endpoints(usize, u64),
    /// A Service's slice becomes two.
    Split(usize),
    /// A Service's slices become one.
    Merge(usize),
    /// An endpoint stands in both slices of a Service.
    Duplicate(usize),
    /// A slice belongs to another Service.
    Relabel(usize, usize),
    /// A Pod is ready, or no longer.
    Ready(usize, bool),
}

/// What happens, in order: each fault with what changes while it lasts or right after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The seed.
    pub seed: u64,
    /// What changes before anything goes wrong.
    pub first: Vec<Change>,
    /// The faults.
    pub faults: Vec<(Fault, Vec<Change>)>,
}

impl Schedule {
    /// What no agent that loses removals lives through: Services go while nobody can see it, and their history with them.
    pub fn of_removals() -> Self {
        Self {
            seed: 0,
            first: vec![
                Change::Delete(0),
                Change::Delete(1),
                Change::Create(0),
                Change::Create(1),
            ],
            faults: vec![(
                Fault::KillServer { compact: true },
                vec![Change::Delete(0), Change::Delete(1)],
            )],
        }
    }

    /// Name lookup fails for three minutes, and an agent begins meanwhile: had its waits grown, that would show when names are back.
    pub fn of_lost_names() -> Self {
        Self {
            seed: 0,
            first: vec![Change::Create(0), Change::Create(1)],
            faults: vec![(
                Fault::BeginWithoutNames(2, 180_000),
                vec![Change::Delete(0), Change::Recreate(1), Change::Create(2)],
            )],
        }
    }

    /// The schedule of a seed. Twelve seeds in a row have every kind of fault.
    pub fn of(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let node = |dice: &mut Dice| *dice.pick(&[1, 2, 3]);
        let mut faults = Vec::new();
        for turn in 0..2 {
            // The first by turns, so that all come; the second by chance.
            let kind = if turn == 0 {
                (seed % 12) as usize
            } else {
                *dice.pick(&QUICK)
            };
            let fault = match kind {
                0 => Fault::KillServer { compact: false },
                1 => Fault::KillServer { compact: true },
                2 => Fault::FreezeServer(300 + dice.below(1_500) as u64),
                3 => Fault::CutOff(node(&mut dice), 300 + dice.below(1_500) as u64),
                4 => Fault::Disconnect,
                5 => Fault::RotateCertificate,
                6 => Fault::RotateToken,
                7 => Fault::ExpireToken,
                8 => Fault::LoseNames,
                9 => Fault::RevokeRights,
                10 => Fault::KillAgent(node(&mut dice)),
                // Node 1 has the client whose connections must live.
                _ => Fault::RebootNode(*dice.pick(&[2, 3])),
            };
            faults.push((fault, changes(&mut dice)));
        }
        Self {
            seed,
            first: changes(&mut dice),
            faults,
        }
    }
}

fn changes(dice: &mut Dice) -> Vec<Change> {
    let count = 1 + dice.below(4);
    (0..count).map(|_| change(dice)).collect()
}

fn change(dice: &mut Dice) -> Change {
    let service = dice.below(SERVICES);
    match dice.below(12) {
        0 | 1 => Change::Create(service),
        2 | 3 => Change::Delete(service),
        4 => Change::Recreate(service),
        5 | 6 => Change::Endpoints(service, dice.roll()),
        7 => Change::Split(service),
        8 => Change::Merge(service),
        9 => Change::Duplicate(service),
        10 => Change::Relabel(service, dice.below(SERVICES)),
        _ => Change::Ready(dice.below(PODS), dice.once_in(2)),
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.first)?;
        for (fault, changes) in &self.faults {
            write!(f, "; {fault:?} {changes:?}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Schedule;

    #[test]
    fn twelve_seeds_have_every_kind_of_fault_and_a_seed_has_one_schedule() {
        let kinds: BTreeSet<&str> = (1..=12).map(|seed| Schedule::of(seed).faults[0].0.name()).collect();
        assert_eq!(kinds.len(), 12);
        assert_eq!(Schedule::of(7), Schedule::of(7));
    }
}
