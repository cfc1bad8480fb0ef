//! How many connections a second the agent can follow: records into all that it makes of them, on one CPU.
//!
//! The records are those of many clients that use their ports again and again, as a busy proxy's do; the ring buffer is left out,
//! for the kernel's side of it is in the connect part. What the agent cannot follow it loses and counts.

use std::{sync::Arc, time::Instant};

use anyhow::Result;
use lb_common::{
    addr::{Addr, Port},
    event::{ConnRecord, kind, outcome},
};
use lb_user::observe::{Observation, UsableBackends};

use super::{Bench, report::Metric};

/// Records of a run.
const RECORDS: u64 = 500_000;
/// Runs; the slowest counts.
const RUNS: usize = 3;
const SERVICES: u64 = 1_000;
const BACKENDS: u64 = 10;
const CLIENTS: u64 = 200;
/// Source ports that each client goes through.
const PORTS: u64 = 1_000;
/// Between two connections, in nanoseconds: 50,000 a second.
const STEP_NS: u64 = 20_000;
const HORIZON_NS: u64 = 120_000_000_000;

/// Measures it.
pub(super) fn measure(bench: &mut Bench) -> Result<()> {
    let mut rates = Vec::new();
    for _ in 0..RUNS {
        bench.check()?;
        rates.push(run());
    }
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    bench.report.add(
        Metric::new("records_per_s", "1/s", slowest, RUNS)
            .with("records", RECORDS)
            .with("services", SERVICES)
            .with("clients", CLIENTS),
    );
    bench
        .report
        .at_least("connections a second that the agent follows", Some(slowest), 50_000.0);
    Ok(())
}

fn run() -> f64 {
    let usable = UsableBackends::new((SERVICES * BACKENDS) as u32 + 1);
    for id in 1..=(SERVICES * BACKENDS) as u32 {
        usable.set(id, true);
    }
    let mut observation = Observation::new(HORIZON_NS, Arc::default());
    let began = Instant::now();
    for n in 0..RECORDS {
        let start_ns = 1_000_000_000 + n * STEP_NS;
        let service = n % SERVICES;
        let record = ConnRecord {
            kind: kind::CONNECTION,
            errno: 0,
            start_ns,
            established_ns: start_ns + 70_000,
            end_ns: start_ns + 1_000_000,
            netns_cookie: n % CLIENTS,
            client: Addr::from_v4((n % CLIENTS) as u32),
            vip: Addr::from_v4(0x0a60_0000 + service as u32),
            service_id: service as u32,
            backend_id: (service * BACKENDS + n / SERVICES % BACKENDS) as u32 + 1,
            client_port: Port::new(10_000 + (n / CLIENTS % PORTS) as u16),
            vip_port: Port::new(80),
            proto: 6,
            outcome: outcome::ESTABLISHED,
            marks: 0,
        };
        // SAFETY: the record has no padding, which its layout is checked for, and is read as bytes while it lives.
        let bytes =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(&record).cast::<u8>(), size_of::<ConnRecord>()) };
        observation.take(bytes, &usable);
        if n % 4_096 == 0 {
            observation.advance(start_ns, &usable);
        }
    }
    RECORDS as f64 / began.elapsed().as_secs_f64()
}
