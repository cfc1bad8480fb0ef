//! What was measured, as a table and as JSON, and what it is held against.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

/// One number with its circumstances.
#[derive(Clone, Debug)]
pub(super) struct Metric {
    name: String,
    unit: &'static str,
    value: f64,
    samples: usize,
    extra: Map<String, Value>,
}

impl Metric {
    pub(super) fn new(name: impl Into<String>, unit: &'static str, value: f64, samples: usize) -> Self {
        Self {
            name: name.into(),
            unit,
            value,
            samples,
            extra: Map::new(),
        }
    }

    /// Adds a field beside the value.
    pub(super) fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.extra.insert(key.to_owned(), value.into());
        self
    }

    fn to_json(&self) -> Value {
        let mut object = Map::new();
        object.insert("name".to_owned(), json!(self.name));
        object.insert("unit".to_owned(), json!(self.unit));
        object.insert("value".to_owned(), json!(round(self.value)));
        object.insert("samples".to_owned(), json!(self.samples));
        for (key, value) in &self.extra {
            let value = value
                .as_f64()
                .filter(|_| value.is_f64())
                .map_or_else(|| value.clone(), |v| json!(round(v)));
            object.insert(key.clone(), value);
        }
        Value::Object(object)
    }
}

/// Four decimals: more would claim a precision that no clock here has.
fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// A number that is held against a bound.
#[derive(Clone, Debug)]
pub(super) struct Target {
    what: String,
    found: f64,
    bound: f64,
    met: bool,
}

/// Everything that was measured.
#[derive(Debug, Default)]
pub(super) struct Report {
    metrics: Vec<Metric>,
    targets: Vec<Target>,
}

impl Report {
    pub(super) fn add(&mut self, metric: Metric) {
        self.metrics.push(metric);
    }

    /// The value of a metric that was measured.
    pub(super) fn value(&self, name: &str) -> Option<f64> {
        self.metrics
            .iter()
            .find(|metric| metric.name == name)
            .map(|metric| metric.value)
    }

    /// Holds a number against its upper bound; one that was not measured is not judged.
    pub(super) fn at_most(&mut self, what: &str, found: Option<f64>, bound: f64) {
        self.judge(what, found, bound, |found| found <= bound);
    }

    /// Holds a number against its lower bound; one that was not measured is not judged.
    pub(super) fn at_least(&mut self, what: &str, found: Option<f64>, bound: f64) {
        self.judge(what, found, bound, |found| found >= bound);
    }

    fn judge(&mut self, what: &str, found: Option<f64>, bound: f64, holds: impl Fn(f64) -> bool) {
        if let Some(found) = found {
            self.targets.push(Target {
                what: what.to_owned(),
                found,
                bound,
                met: holds(found),
            });
        }
    }

    pub(super) fn missed(&self) -> usize {
        self.targets.iter().filter(|target| !target.met).count()
    }

    pub(super) fn to_json(&self) -> Value {
        self.metrics.iter().map(Metric::to_json).collect()
    }

    /// The table for people: metrics, then targets.
    pub(super) fn to_text(&self) -> String {
        let width = self.metrics.iter().map(|m| m.name.len()).max().unwrap_or(0);
        let mut out = String::new();
        for metric in &self.metrics {
            let beside: Vec<String> = metric
                .extra
                .iter()
                .map(|(key, value)| match value.as_f64() {
                    Some(number) => format!("{key} {}", shown(number)),
                    None => format!("{key} {value}"),
                })
                .collect();
            line(
                &mut out,
                format_args!(
                    "{:width$}  {:>10} {:<5} {:>7} samples  {}",
                    metric.name,
                    shown(metric.value),
                    metric.unit,
                    metric.samples,
                    beside.join(", ")
                ),
            );
        }
        let width = self.targets.iter().map(|t| t.what.len()).max().unwrap_or(0);
        line(&mut out, format_args!(""));
        for target in &self.targets {
            line(
                &mut out,
                format_args!(
                    "{:width$}  {:>10}  (target {:>6})  {}",
                    target.what,
                    shown(target.found),
                    shown(target.bound),
                    if target.met { "met" } else { "MISSED" }
                ),
            );
        }
        out
    }
}

/// A number with as many decimals as people can use.
fn shown(value: f64) -> String {
    match value.abs() {
        v if v.fract().abs() < f64::EPSILON && v < 1e15 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.1}"),
        v if v >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Appends a line; writing to a `String` cannot fail.
fn line(out: &mut String, content: std::fmt::Arguments<'_>) {
    let _ = writeln!(out, "{content}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_was_not_measured_is_not_judged() {
        let mut report = Report::default();
        report.add(Metric::new("a", "us", 1.5, 3).with("min", 1.0));
        report.at_most("a within 1", report.value("a"), 1.0);
        report.at_most("b within 1", report.value("b"), 1.0);
        report.at_least("a at least 1", report.value("a"), 1.0);
        assert_eq!((report.targets.len(), report.missed()), (2, 1));
        assert_eq!(
            report.to_json(),
            json!([{"name": "a", "unit": "us", "value": 1.5, "samples": 3, "min": 1.0}])
        );
    }
}
