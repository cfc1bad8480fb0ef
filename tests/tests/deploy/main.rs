//! The files that are deployed with the agent: Prometheus' rules and Grafana's dashboard.
//!
//! Every name in them is one that the agent exports, every alert has a case that fires it and one that leaves it silent, and
//! every command that an alert recommends exists.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};
use lb_tests::{
    agent::binary,
    prometheus::{
        self, RULE_FILES, dashboard, program,
        promql::{Names, Registry, names},
        queries, rules, rules_folder,
    },
    runner::{self, test},
};

fn main() -> ExitCode {
    runner::run_plain(vec![
        test("promtool_accepts_the_rules", promtool_accepts),
        test("promtool_sees_each_alert_fire_and_stay_silent", promtool_tests),
        test("every_alert_has_both_cases", both_cases),
        test("rules_use_names_that_exist", rule_names),
        test("the_dashboard_uses_names_that_exist", dashboard_names),
        test("the_dashboard_is_whole", dashboard_whole),
        test("alerts_recommend_commands_that_exist", commands),
        test("the_manifest_is_up_to_date", manifest),
        test("the_scanner_finds_names", scanner),
    ])
}

fn promtool(arguments: &[&str]) -> Result<()> {
    let output = Command::new(program("promtool")?)
        .args(arguments)
        .current_dir(rules_folder())
        .output()
        .context("run promtool")?;
    ensure!(
        output.status.success(),
        "promtool {arguments:?}:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn promtool_accepts() -> Result<()> {
    promtool(&[&["check", "rules", "--lint-fatal"], &RULE_FILES[..]].concat())
}

fn promtool_tests() -> Result<()> {
    promtool(&["test", "rules", "tests.yaml"])
}

/// A case is named `ALERT fires: WHAT` or `ALERT is silent: WHAT`, and asks for that alert.
fn both_cases() -> Result<()> {
    let tests = prometheus::yaml("tests.yaml")?;
    let mut cases: BTreeMap<String, BTreeSet<bool>> = BTreeMap::new();
    for case in tests["tests"].as_array().context("no tests")? {
        let name = case["name"].as_str().context("a case without a name")?;
        let Some((told, _)) = name.split_once(':') else {
            continue;
        };
        let (alert, fires) = match (told.strip_suffix(" fires"), told.strip_suffix(" is silent")) {
            (Some(alert), _) => (alert, true),
            (_, Some(alert)) => (alert, false),
            _ => anyhow::bail!("neither fires nor is silent: {name}"),
        };
        let asked = &case["promql_expr_test"][0];
        let expression = asked["expr"].as_str().context("a case that asks nothing")?;
        ensure!(
            expression.contains(&format!("alertname=\"{alert}\"")),
            "{name} asks {expression}"
        );
        let expects = asked["exp_samples"].as_array().context("no expectation")?;
        ensure!(expects.is_empty() != fires, "{name} expects {expects:?}");
        cases.entry(alert.to_owned()).or_default().insert(fires);
    }
    let alerts: BTreeSet<String> = rules()?.into_iter().filter(|r| r.alert).map(|r| r.name).collect();
    ensure!(alerts.iter().eq(cases.keys()), "alerts {alerts:?}, cases {cases:?}");
    for (alert, both) in cases {
        ensure!(both.len() == 2, "{alert} has only cases that {both:?}");
    }
    Ok(())
}

fn registry() -> Result<Registry> {
    let rules = rules()?;
    let recorded = rules.iter().filter(|rule| !rule.alert).map(|rule| rule.name.as_str());
    Ok(Registry::new(recorded))
}

fn rule_names() -> Result<()> {
    let registry = registry()?;
    for rule in rules()? {
        registry.check(&rule.expression).with_context(|| rule.name.clone())?;
        if !rule.alert {
            continue;
        }
        let told: BTreeSet<&str> = rule.annotations.iter().map(|(name, _)| name.as_str()).collect();
        ensure!(
            told == BTreeSet::from(["description", "runbook", "summary"]),
            "{} tells {told:?}",
            rule.name
        );
        // An alert about a Service says how to ask about it.
        let about_service = rule
            .annotations
            .iter()
            .any(|(_, text)| text.contains("$labels.service"));
        let asks = rule
            .annotations
            .iter()
            .any(|(name, text)| name == "runbook" && text.contains("`evenkeel diagnose"));
        ensure!(asks || !about_service, "{} does not say what to run", rule.name);
    }
    Ok(())
}

fn dashboard_names() -> Result<()> {
    let registry = registry()?;
    for query in queries()? {
        registry.check(&query.expression).with_context(|| query.panel.clone())?;
    }
    let dashboard = dashboard()?;
    let mut variables = BTreeSet::new();
    for variable in dashboard["templating"]["list"].as_array().context("no variables")? {
        variables.insert(variable["name"].as_str().context("no name")?.to_owned());
        if variable["type"] != "query" {
            continue;
        }
        let query = variable["query"]["query"].as_str().context("no query")?;
        let asked = query
            .strip_prefix("label_values(")
            .and_then(|asked| asked.strip_suffix(')'))
            .and_then(|asked| asked.rsplit_once(','))
            .with_context(|| format!("not label_values: {query}"))?;
        registry.check(&format!("sum by ({}) ({})", asked.1, asked.0))?;
    }
    ensure!(
        variables == ["datasource", "namespace", "service"].map(str::to_owned).into(),
        "{variables:?}"
    );
    Ok(())
}

/// Panels have identities, places and explanations of their own.
fn dashboard_whole() -> Result<()> {
    let dashboard = dashboard()?;
    let mut ids = BTreeSet::new();
    let mut cells = BTreeSet::new();
    for panel in dashboard["panels"].as_array().context("no panels")? {
        let title = &panel["title"];
        ensure!(ids.insert(panel["id"].as_u64()), "{title}: another panel has its id");
        let place = |side: &str| panel["gridPos"][side].as_u64().context("no place");
        let (x, y, w, h) = (place("x")?, place("y")?, place("w")?, place("h")?);
        ensure!(x + w <= 24, "{title} is off the grid");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            ensure!(cells.insert(cell), "{title} covers another panel");
        }
        if panel["type"] == "row" {
            continue;
        }
        ensure!(
            panel["description"].as_str().is_some_and(|text| !text.is_empty()),
            "{title}: no description"
        );
        ensure!(
            panel["targets"].as_array().is_some_and(|all| !all.is_empty()),
            "{title}: no query"
        );
    }
    Ok(())
}

/// Each `evenkeel VERB` in the runbooks is a verb.
fn commands() -> Result<()> {
    let mut verbs = BTreeSet::new();
    for (_, text) in rules()?.into_iter().flat_map(|rule| rule.annotations) {
        for command in text.split('`').skip(1).step_by(2) {
            let Some(arguments) = command.strip_prefix("evenkeel ") else {
                continue;
            };
            let words = arguments
                .split_whitespace()
                .take_while(|word| word.bytes().all(|b| b.is_ascii_lowercase()));
            verbs.insert(words.map(str::to_owned).collect::<Vec<_>>());
        }
    }
    ensure!(verbs.len() > 3, "only {verbs:?} found");
    for verb in verbs {
        let output = Command::new(binary())
            .args(&verb)
            .arg("--help")
            .output()
            .context("run evenkeel")?;
        ensure!(
            output.status.success(),
            "evenkeel {}: {}",
            verb.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

/// The rule files as one object for the Prometheus operator.
fn written_manifest() -> Result<String> {
    let mut manifest = String::from(
        "# Written from recording.yaml and alerts.yaml (`cargo xtask bless`); do not edit by hand.\n\
         apiVersion: monitoring.coreos.com/v1\n\
         kind: PrometheusRule\n\
         metadata:\n  name: evenkeel\n  labels:\n    app.kubernetes.io/name: evenkeel\n\
         spec:\n  groups:\n",
    );
    for file in RULE_FILES {
        let text = fs::read_to_string(rules_folder().join(file)).with_context(|| format!("read {file}"))?;
        let (_, groups) = text.split_once("\ngroups:\n").context("no groups")?;
        for line in groups.lines() {
            if !line.is_empty() {
                manifest.push_str("  ");
                manifest.push_str(line);
            }
            manifest.push('\n');
        }
    }
    Ok(manifest)
}

/// With EVENKEEL_BLESS=1 this writes the manifest first.
fn manifest() -> Result<()> {
    let path = rules_folder().join("manifest.yaml");
    let wanted = written_manifest()?;
    if env::var_os("EVENKEEL_BLESS").is_some() {
        fs::write(&path, &wanted).with_context(|| format!("write {}", path.display()))?;
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    ensure!(
        found == wanted,
        "deploy/prometheus/manifest.yaml is stale: run `cargo xtask bless`"
    );
    // What the operator reads is what the files say.
    let groups = RULE_FILES.map(|file| prometheus::yaml(file).map(|content| content["groups"].clone()));
    let mut all = Vec::new();
    for group in groups {
        all.extend(group?.as_array().context("no groups")?.clone());
    }
    ensure!(
        prometheus::yaml("manifest.yaml")?["spec"]["groups"].as_array() == Some(&all),
        "the manifest's rules are others"
    );
    Ok(())
}

fn scanner() -> Result<()> {
    let found = names(
        "max by (service, le) (rate(a_total{b=\"c{d}\", e=~\"$f\"}[$g])) / on (h) group_left () i:j:k offset 5m > bool 1e3 and l",
    )?;
    let selector = |metric: &str, labels: &[&str]| (metric.to_owned(), labels.iter().map(|&l| l.to_owned()).collect());
    ensure!(
        found
            == Names {
                selectors: vec![
                    selector("a_total", &["b", "e"]),
                    selector("i:j:k", &[]),
                    selector("l", &[])
                ],
                groupings: ["service", "le", "h"].map(str::to_owned).into(),
            },
        "{found:?}"
    );
    let registry = Registry::new(["service:x:sum"]);
    for good in [
        "sum by (service) (evenkeel_service_connects_total{namespace=\"a\"})",
        "histogram_quantile(0.9, sum by (le) (rate(evenkeel_connect_duration_seconds_bucket[5m])))",
        "service:x:sum{service=\"a\"}",
    ] {
        registry.check(good)?;
    }
    for bad in [
        "evenkeel_service_connect_total",
        "evenkeel_connect_duration_seconds",
        "evenkeel_service_connects_total{cause=\"a\"}",
        "sum by (backend) (evenkeel_service_connects_total)",
        "service:x:sum{namespace=\"a\"}",
        "{service=\"a\"}",
        "1 + 1",
    ] {
        ensure!(registry.check(bad).is_err(), "accepted: {bad}");
    }
    Ok(())
}
