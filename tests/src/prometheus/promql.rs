//! What names an expression of PromQL uses.
//!
//! A scanner and no parser: whether an expression is one, `promtool` and Prometheus say. Here it is only asked whether all its
//! names exist: metrics in the list that the agent exports (or among the recorded ones), labels on those metrics.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail, ensure};
use lb_user::metrics::families::{self, Kind};

/// What stands before the label lists that a match or an aggregation names.
const GROUPINGS: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
/// Words that are no metric where no parenthesis follows.
const WORDS: [&str; 17] = [
    "and", "or", "unless", "bool", "offset", "sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile",
    "stddev", "group", "inf", "nan",
];
/// Labels that the scrape adds to every series.
const TARGET_LABELS: [&str; 2] = ["job", "instance"];

/// The names in an expression.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Each selector: the metric, and the labels that it matches by.
    pub selectors: Vec<(String, Vec<String>)>,
    /// Labels that matches and aggregations name.
    pub groupings: BTreeSet<String>,
}

/// The names in an expression.
///
/// # Errors
/// Where something is not closed, or a selector has no metric's name.
pub fn names(expression: &str) -> Result<Names> {
    let mut found = Names::default();
    let mut rest = expression.trim_start();
    while let Some(first) = rest.chars().next() {
        if first.is_ascii_alphabetic() || first == '_' || first == ':' {
            let (word, after) = split_word(rest);
            rest = after.trim_start();
            if GROUPINGS.contains(&word) {
                if let Some(list) = rest.strip_prefix('(') {
                    let (list, after) = until(list, ')')?;
                    found.groupings.extend(
                        list.split(',')
                            .map(|label| label.trim().to_owned())
                            .filter(|l| !l.is_empty()),
                    );
                    rest = after;
                }
            } else if !rest.starts_with('(') && !WORDS.contains(&word.to_ascii_lowercase().as_str()) {
                let mut labels = Vec::new();
                if let Some(matchers) = rest.strip_prefix('{') {
                    (labels, rest) = matcher_labels(matchers)?;
                }
                found.selectors.push((word.to_owned(), labels));
            }
        } else if first.is_ascii_digit() {
            rest = rest.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || c == '.');
        } else if first == '"' {
            rest = until(&rest[1..], '"')?.1;
        } else if first == '[' {
            rest = until(&rest[1..], ']')?.1;
        } else if first == '{' {
            bail!("a selector without a metric's name in: {expression}");
        } else {
            rest = &rest[first.len_utf8()..];
        }
        rest = rest.trim_start();
    }
    Ok(found)
}

fn split_word(text: &str) -> (&str, &str) {
    let end = text
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))
        .unwrap_or(text.len());
    text.split_at(end)
}

fn until(text: &str, end: char) -> Result<(&str, &str)> {
    match text.split_once(end) {
        Some(parts) => Ok(parts),
        None => bail!("no {end} in: {text}"),
    }
}

/// The labels of matchers such as `a="x", b=~"y"}`, and what follows the brace.
fn matcher_labels(mut rest: &str) -> Result<(Vec<String>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([',', ' ', '\n']);
        if let Some(after) = rest.strip_prefix('}') {
            return Ok((labels, after));
        }
        let (label, after) = split_word(rest);
        ensure!(!label.is_empty(), "no label at: {rest}");
        labels.push(label.to_owned());
        let (_, value) = until(after, '"')?;
        rest = until(value, '"')?.1;
    }
}

/// Which metrics there are, with their labels.
#[derive(Clone, Debug)]
pub struct Registry {
    labels: BTreeMap<String, BTreeSet<String>>,
}

impl Registry {
    /// What the agent exports, what the named rules record (`LABEL_LABEL:metric:operation`), and what Prometheus itself adds.
    pub fn new<'a>(recorded: impl IntoIterator<Item = &'a str>) -> Self {
        let mut labels: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for family in families::ALL {
            let own: BTreeSet<String> = family.labels.iter().map(|&label| label.to_owned()).collect();
            let own: BTreeSet<String> = own.into_iter().chain(TARGET_LABELS.map(str::to_owned)).collect();
            match family.kind {
                Kind::Counter | Kind::Gauge => {
                    labels.insert(family.name.to_owned(), own);
                }
                Kind::Histogram(_) => {
                    for suffix in ["_sum", "_count", "_bucket"] {
                        let mut own = own.clone();
                        if suffix == "_bucket" {
                            own.insert("le".to_owned());
                        }
                        labels.insert(format!("{}{suffix}", family.name), own);
                    }
                }
            }
        }
        for name in recorded {
            let level = name.split(':').next().unwrap_or_default();
            labels.insert(name.to_owned(), level.split('_').map(str::to_owned).collect());
        }
        labels.insert("up".to_owned(), TARGET_LABELS.map(str::to_owned).into());
        Self { labels }
    }

    /// Whether all names of an expression exist.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self, expression: &str) -> Result<()> {
        let names = names(expression)?;
        ensure!(!names.selectors.is_empty(), "no metric in: {expression}");
        let mut any = BTreeSet::new();
        for (metric, matched) in &names.selectors {
            let Some(labels) = self.labels.get(metric) else {
                bail!("no metric {metric}, in: {expression}");
            };
            for label in matched {
                ensure!(
                    labels.contains(label),
                    "{metric} has no label {label}, in: {expression}"
                );
            }
            any.extend(labels);
        }
        for label in &names.groupings {
            ensure!(any.contains(label), "no metric has the label {label}, in: {expression}");
        }
        Ok(())
    }
}
