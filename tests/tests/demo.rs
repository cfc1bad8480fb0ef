//! The demo's machinery, with the reference in place of the agent.

use anyhow::{Context, Result};
use lb_user::demo;

#[test]
fn the_reference_arm_plays_every_act_and_loses_nothing() -> Result<()> {
    let acts = demo::run_reference(1_500)?;
    let names: Vec<_> = acts.iter().map(|act| act.name).collect();
    assert_eq!(names, ["steady", "scale_out", "backend_removed"]);
    let [steady, scale_out, removed] = &acts[..] else {
        unreachable!("three names, three acts")
    };

    assert_eq!((steady.connections, steady.per_backend.len()), (1_500, 3));
    for act in &acts {
        assert_eq!(act.failed, 0, "{}: {:?}", act.name, act.failures);
        assert_eq!(act.per_backend.values().sum::<u64>(), act.connections, "{}", act.name);
        assert!(act.connect_us.p50 > 0.0);
    }

    let new = scale_out.new_backends.as_ref().context("scale_out has new backends")?;
    assert_eq!(scale_out.new_backend_share_of_fair.len(), 3);
    // Chance alone moves a share by a few percent; only a gross error is one of the demo's.
    for (backend, share) in &scale_out.new_backend_share_of_fair {
        assert!((0.7..1.3).contains(share), "{backend}: {share}");
    }
    assert!(new.first_second.connections > 0 && new.after.connections > 0);

    let gone = removed.removed_backend.as_ref().context("backend_removed names one")?;
    assert_eq!(gone.connections_after, 0);
    assert_eq!(removed.even.per_backend.len(), 5);
    assert!(!removed.even.per_backend.contains_key(&gone.backend));
    Ok(())
}
