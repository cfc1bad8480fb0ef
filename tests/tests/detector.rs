//! A small part of the simulation that `evenkeel-bench --only detector` runs in full: no false alarm, and none missed.

use lb_tests::bench::detector::{
    SIZES,
    exact::{self, Rule},
    fair::{self, Alarms},
    power,
};

#[test]
fn fair_services_are_silent_where_the_naive_rule_is_not() {
    let mut alarms = Alarms::default();
    // A quarter of a day each, so that more sizes and rates are met in the same time.
    for seed in 0..16 {
        alarms.add(&fair::service_day(seed, fair::DAY_SECONDS / 4).expect("the simulation's own numbers are valid"));
    }
    println!("4 service-days of 16 services: {alarms:?}");
    assert_eq!(alarms.all(), 0, "expected are some 0.002");
    assert!(alarms.births > 0);
    assert!(alarms.naive > 100, "the naive rule alarms dozens of times a day");
}

#[test]
fn one_false_alarm_in_a_thousand_service_days_at_any_rate() {
    let mut beyond = 0;
    for k in SIZES {
        for rate in [2.0, 30.0, 160.0, 480.0, 840.0] {
            let budgeted = exact::running_per_day(k, rate, Rule::Budgeted);
            let written = exact::running_per_day(k, rate, Rule::Written);
            println!("k {k}, {rate}/s: {budgeted:.1e} a service-day, {written:.1e} without the budget");
            assert!(budgeted < 1e-3, "k {k}, {rate}/s: {budgeted:e}");
            beyond += u32::from(written > 1e-3);
        }
        let birth = exact::birth(k, Rule::Budgeted);
        let written = exact::birth(k, Rule::Written);
        println!("k {k}: {birth:.1e} a birth, {written:.1e} if later looks cost as much as the first");
        assert!(birth < 1.5e-3 / f64::from(k) && birth < written, "k {k}: {birth:e}");
    }
    assert!(beyond > 0, "the budget is there for a reason");
}

#[test]
fn a_zero_share_is_found_as_soon_as_promised() {
    for k in [2, 10, 100] {
        for rate in [20.0, 300.0] {
            let birth = power::birth(k, rate, 5).expect("found");
            let running = power::running(k, rate, 5).expect("found");
            println!("k {k}, {rate}/s: {birth:?} {running:?}");
            assert_eq!((birth.late, running.late), (0, 0), "k {k}, {rate}/s");
        }
    }
}
