//! The ratios of what was measured, and what they are held against.
//!
//! Times of one run alone can be compared, so every judgement is one of kube-proxy's numbers over Evenkeel's own of the same run.

use super::{Options, proxy::Kind};
use crate::{
    bench::{Bench, report::Metric},
    kube_proxy::Mode,
};

/// The size and the mode that are judged.
const JUDGED: (u32, Mode) = (10_000, Mode::Nftables);

/// Adds the ratios, and judges those that are held against something.
pub(super) fn judge(bench: &mut Bench, options: &Options) {
    for count in &options.services {
        for kind in options.kinds() {
            let Kind::KubeProxy { mode, at_once } = kind else {
                continue;
            };
            let ratio = |bench: &Bench, name: &str, theirs: &str| {
                let value = |who: &str| bench.report.value(&format!("{name}.{who}@{count}"));
                part(value(theirs), value("evenkeel"))
            };
            let full = kind.to_string();
            let change = ratio(bench, "kube_change_ms_p99", &full);
            let storm = ratio(bench, "kube_storm_cpu_ms_per_s", &full);
            let start = ratio(bench, "kube_start_s", mode.name()).filter(|_| at_once);
            let memory = ratio(bench, "kube_pss_mb", &full);
            for (name, who, value) in [
                ("kube_change_ratio_p99", full.as_str(), change),
                ("kube_start_ratio", mode.name(), start),
                ("kube_pss_ratio", &full, memory),
                ("kube_storm_cpu_ratio", &full, storm),
            ] {
                if let Some(value) = value {
                    bench
                        .report
                        .add(Metric::new(format!("{name}.{who}@{count}"), "1", value, 1));
                }
            }
            if (*count, mode) != JUDGED {
                continue;
            }
            let report = &mut bench.report;
            report.at_least(
                &format!("one change @{count}: times sooner than {full} at p99"),
                change,
                50.0,
            );
            report.at_least(
                &format!("full start @{count}: times sooner than {}", mode.name()),
                start,
                50.0,
            );
            let own_part = memory.map(f64::recip);
            report.at_most(&format!("memory @{count}: as a part of {full}'s"), own_part, 0.25);
        }
    }
}

/// Theirs over ours, if both were measured.
fn part(theirs: Option<f64>, own: Option<f64>) -> Option<f64> {
    theirs
        .zip(own)
        .filter(|(theirs, own)| *theirs > 0.0 && *own > 0.0)
        .map(|(theirs, own)| theirs / own)
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn what_was_not_measured_has_no_ratio() {
        assert_eq!(part(Some(9.0), Some(3.0)), Some(3.0));
        assert_eq!(part(Some(0.0), Some(3.0)), None);
        assert_eq!(part(None, Some(3.0)), None);
    }
}
