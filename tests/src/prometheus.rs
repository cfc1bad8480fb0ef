//! Prometheus' files of this repository: where they are, what they contain, and the programs that read them.
//!
//! Nothing is judged here. The programs are the machine's own, or those that `cargo xtask setup` has unpacked into the cache.

pub mod promql;

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::runner;

/// The folder of the rules.
pub fn rules_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/prometheus")
}

/// The rule files, the recording ones first.
pub const RULE_FILES: [&str; 2] = ["recording.yaml", "alerts.yaml"];

/// A program of Prometheus; a skip where it is not to be had.
///
/// # Errors
/// The skip.
pub fn program(name: &str) -> Result<PathBuf> {
    let given = env::var_os("EVENKEEL_PROMETHEUS").map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    given
        .into_iter()
        .chain(cache().map(|cache| cache.join("prometheus/usr/bin")))
        .chain(env::split_paths(&path))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .ok_or_else(|| runner::skip(format!("there is no {name}; `cargo xtask setup` brings it")))
}

/// The cache of the tasks, as they find it.
fn cache() -> Option<PathBuf> {
    let var = |name| env::var_os(name).map(PathBuf::from);
    var("EVENKEEL_CACHE")
        .or_else(|| Some(var("XDG_CACHE_HOME")?.join("evenkeel")))
        .or_else(|| Some(var("HOME")?.join(".cache/evenkeel")))
}

/// One rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The name of the series that it records, or of its alert.
    pub name: String,
    /// Whether it is an alert.
    pub alert: bool,
    /// Its expression.
    pub expression: String,
    /// Its annotations' texts.
    pub annotations: Vec<(String, String)>,
}

/// Reads a YAML file of the folder of rules.
///
/// # Errors
/// Where it cannot be read.
pub fn yaml(file: &str) -> Result<Value> {
    let path = rules_folder().join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    serde_saphyr::from_str(&text).with_context(|| format!("understand {}", path.display()))
}

/// All rules of both files.
///
/// # Errors
/// Where a file is not what it should be.
pub fn rules() -> Result<Vec<Rule>> {
    let mut rules = Vec::new();
    for file in RULE_FILES {
        let content = yaml(file)?;
        let groups = content["groups"].as_array().context("no groups")?;
        for rule in groups.iter().filter_map(|group| group["rules"].as_array()).flatten() {
            let text = |field: &str| rule[field].as_str().map(str::to_owned);
            let alert = text("alert");
            let annotations = rule["annotations"].as_object().into_iter().flatten();
            rules.push(Rule {
                alert: alert.is_some(),
                name: alert.or_else(|| text("record")).context("a rule without a name")?,
                expression: text("expr").context("a rule without an expression")?,
                annotations: annotations
                    .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
                    .collect(),
            });
        }
    }
    Ok(rules)
}

/// One query of a panel of the dashboard.
#[derive(Clone, Debug)]
pub struct Query {
    /// The panel's title.
    pub panel: String,
    /// The expression, with Grafana's variables.
    pub expression: String,
    /// Whether it asks for one moment instead of a range.
    pub instant: bool,
}

/// The dashboard.
///
/// # Errors
/// Where it cannot be read.
pub fn dashboard() -> Result<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/grafana/evenkeel.json");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("understand {}", path.display()))
}

/// All queries of the dashboard's panels.
///
/// # Errors
/// Where the dashboard is not what it should be.
pub fn queries() -> Result<Vec<Query>> {
    let dashboard = dashboard()?;
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().context("no panels")? {
        let title = panel["title"].as_str().context("a panel without a title")?;
        for target in panel["targets"].as_array().into_iter().flatten() {
            queries.push(Query {
                panel: title.to_owned(),
                expression: target["expr"].as_str().context("a target without a query")?.to_owned(),
                instant: target["instant"] == true,
            });
        }
    }
    Ok(queries)
}
