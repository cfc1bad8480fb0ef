//! Services in simulated seconds: what must be found, how soon, and what must stay silent for ten minutes.

use super::{
    super::simulated::{SECOND, World, fair, first_two, round_robin},
    Clock, RUNNING_EXPECTED, Transition,
};

/// Seeds of the runs of every negative: each is a service of its own.
const SEEDS: std::ops::Range<u64> = 0..10;
const TEN_MINUTES: u32 = 600;

#[test]
fn the_founding_story_is_found_at_birth() {
    for rate in [3.0, 9.0, 30.0, 1000.0] {
        let mut world = World::new(7, 2);
        world.run(60, rate, fair);
        world.assert_silent();
        world.add(3, 1);
        let born_ns = world.now_ns;
        world.run(120, rate, first_two);
        let raised = world.changes[0];
        assert_eq!(
            (raised.transition, raised.judgement.backend, raised.judgement.clock),
            (Transition::Raised, 3, Clock::Birth)
        );
        // A zero share is found after ln(1000 k) + 2 expected connections: the 2 are for what comes between readings.
        let bound = 3000_f64.ln() + 2.0_f64.max(rate / 3.0);
        assert!(raised.judgement.expected <= bound, "at {rate}: {raised:?}");
        let within = 4.0 + bound / (rate / 3.0);
        assert!(
            ((raised.at_ns - born_ns) as f64) < within * 1e9,
            "at {rate}: {raised:?}"
        );
        assert_eq!(world.changes.len(), 1, "it stays: {:?}", world.changes);
        // The load stops, and the proxy chooses anew.
        world.run(120, rate, fair);
        assert_eq!(world.changes[1].transition, Transition::Recovered, "at {rate}");
        assert_eq!(world.changes.len(), 2);
    }
}

#[test]
fn one_that_stops_getting_its_share_is_found_within_a_window() {
    for rate in [2.0, 10.0, 45.0, 100.0, 1000.0] {
        let mut world = World::new(11, 3);
        world.run(90, rate, fair);
        world.assert_silent();
        let from_ns = world.now_ns;
        world.run(90, rate, first_two);
        let raised = world.changes[0];
        assert_eq!(
            (raised.transition, raised.judgement.backend, raised.judgement.clock),
            (Transition::Raised, 3, Clock::Running)
        );
        // The window that was open when it began, and a whole one.
        let window = 1.0 + (RUNNING_EXPECTED + 3_f64.ln() + 3.4) / (rate / 3.0);
        assert!(
            ((raised.at_ns - from_ns) as f64) < (2.0 * window + 1.0) * 1e9,
            "at {rate}: {raised:?}"
        );
    }
}

#[test]
fn an_agent_that_restarts_finds_it_again_by_windows() {
    let mut world = World::new(3, 2);
    world.run(30, 30.0, fair);
    world.add(3, 1);
    world.run(30, 30.0, first_two);
    assert_eq!(world.changes.len(), 1);
    world.restart();
    let from_ns = world.now_ns;
    world.run(30, 30.0, first_two);
    let again = world.changes[1];
    assert_eq!(
        (again.transition, again.judgement.clock),
        (Transition::Raised, Clock::Running)
    );
    assert!(again.at_ns - from_ns <= 4 * SECOND, "{again:?}");
}

#[test]
fn silent_at_a_low_rate() {
    for seed in SEEDS {
        let mut world = World::new(seed, 5);
        world.run(TEN_MINUTES, 0.2, fair);
        world.add(6, 1);
        world.run(TEN_MINUTES, 0.2, fair);
        world.assert_silent();
    }
}

#[test]
fn silent_at_a_fair_random_choice() {
    for seed in SEEDS {
        for (k, rate) in [(2, 40.0), (10, 12.0), (30, 300.0)] {
            let mut world = World::new(seed, k);
            world.run(TEN_MINUTES, rate, fair);
            world.assert_silent();
        }
    }
}

#[test]
fn silent_at_a_ramp_up_after_a_scale_out() {
    for seed in SEEDS {
        let mut world = World::new(seed, 2);
        world.mean_life_ns = 60e9;
        world.run(60, 20.0, fair);
        world.add(3, 1);
        world.run(200, 20.0, fair);
        for backend in 4..8 {
            world.add(backend, 1);
        }
        world.run(TEN_MINUTES, 20.0, fair);
        world.assert_silent();
    }
}

#[test]
fn silent_on_endpoints_that_topology_excludes() {
    for seed in SEEDS {
        let mut world = World::new(seed, 3);
        for member in &mut world.members[1..] {
            member.weight = 0;
        }
        world.restart();
        world.run(TEN_MINUTES / 2, 50.0, fair);
        // The hints change over: another one takes all, from the next reading on.
        world.members[0].weight = 0;
        world.members[1].weight = 1;
        world.run(TEN_MINUTES / 2, 50.0, fair);
        world.assert_silent();
    }
}

#[test]
fn silent_at_weights_1_to_3() {
    for seed in SEEDS {
        let mut world = World::new(seed, 1);
        world.add(2, 3);
        world.run(TEN_MINUTES, 8.0, fair);
        world.members[0].weight = 3;
        world.members[1].weight = 1;
        world.run(TEN_MINUTES, 8.0, fair);
        world.assert_silent();
    }
}

#[test]
fn silent_at_a_service_scaled_to_zero_and_back() {
    for seed in SEEDS {
        let mut world = World::new(seed, 3);
        world.run(120, 25.0, fair);
        for backend in 1..=3 {
            world.remove(backend);
        }
        world.run(60, 25.0, fair);
        // Back one after the other, two of them under their old ids.
        for backend in [2, 3, 9] {
            world.add(backend, 1);
            world.run(3, 25.0, fair);
        }
        world.run(TEN_MINUTES, 25.0, fair);
        world.assert_silent();
    }
}

#[test]
fn silent_at_round_robin() {
    for rate in [1.0, 17.0, 160.0] {
        let mut world = World::new(1, 4);
        world.run(TEN_MINUTES, rate, round_robin);
        world.assert_silent();
    }
}

#[test]
fn silent_over_restarts_of_the_agent() {
    for seed in SEEDS {
        let mut world = World::new(seed, 4);
        for _ in 0..20 {
            world.run(30, 40.0, fair);
            world.restart();
        }
        world.assert_silent();
    }
}
