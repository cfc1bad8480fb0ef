//! The page's tables: endpoints, evenness in numbers, facts beside them, the node's settings.

use std::fmt::Write as _;

use super::second;
use crate::{
    draw::{compact, escape, percent, thousands},
    view::{DiagnosisView, EndpointView, ImbalanceView, NodeFactsView, Timestamp, wording::numbers::chance},
};

/// Endpoints that are listed at once; the rest unfolds.
const AT_ONCE: usize = 12;

/// The endpoints, the starved first.
pub(super) fn endpoints(diagnosis: &DiagnosisView, now: Timestamp) -> String {
    if diagnosis.endpoints.is_empty() {
        return String::new();
    }
    let mut all: Vec<&EndpointView> = diagnosis.endpoints.iter().collect();
    all.sort_by_key(|endpoint| rank(&endpoint.status));
    let seen: u64 = all.iter().map(|endpoint| endpoint.window_connects).sum();
    let rows: Vec<String> = all.iter().map(|endpoint| row(diagnosis, endpoint, seen, now)).collect();
    let (shown, folded) = rows.split_at(rows.len().min(AT_ONCE));
    let mut out = format!(
        "<h3 style=\"margin-top:20px\">Endpoints</h3>\n<div class=\"scroll\">{}</div>\n",
        table(shown)
    );
    if !folded.is_empty() {
        // Writing into a String cannot fail.
        let _infallible = write!(
            out,
            "<details><summary>{} more</summary>\n<div class=\"scroll\">{}</div></details>\n",
            folded.len(),
            table(folded)
        );
    }
    out
}

fn table(rows: &[String]) -> String {
    format!(
        "<table>\n<tr><th>Endpoint</th><th>Status</th><th>Usable since</th><th class=\"n\">New, last minute</th>\
         <th class=\"n\">Expected</th><th class=\"n\">Share</th><th class=\"n\">New, since start</th><th class=\"n\">Open</th>\
         <th class=\"n\">Weight</th><th>In the proxy</th></tr>\n{}</table>",
        rows.concat()
    )
}

fn rank(status: &str) -> u8 {
    match status {
        "starved" => 0,
        "fair" | "unknown" => 1,
        _ => 2,
    }
}

fn row(diagnosis: &DiagnosisView, endpoint: &EndpointView, seen: u64, now: Timestamp) -> String {
    let cause = diagnosis
        .starved
        .iter()
        .find(|starved| (starved.addr, starved.port) == (endpoint.addr, endpoint.port))
        .map(|starved| starved.cause.as_str());
    let (class, sign) = match endpoint.status.as_str() {
        "starved" => ("starved", "✖ "),
        "fair" => ("fair-word", "✔ "),
        _ => ("soft", "– "),
    };
    let why = endpoint.excluded.as_deref().or(cause);
    let status = why.map_or_else(|| endpoint.status.clone(), |why| format!("{}: {why}", endpoint.status));
    let born = endpoint.born.map_or_else(
        || "before the agent".to_owned(),
        |born| format!("{} ({} s)", second(born), now.since(born).as_secs()),
    );
    let share = if seen > 0 {
        percent(endpoint.window_connects as f64 / seen as f64)
    } else {
        "–".to_owned()
    };
    let weight = match endpoint.proxy_weight {
        Some(weight) if u64::from(weight) != u64::from(endpoint.weight) => {
            format!("{} (proxy: {weight})", endpoint.weight)
        }
        _ => endpoint.weight.to_string(),
    };
    let programmed = match endpoint.programmed {
        Some(true) => "yes",
        Some(false) => "✖ no",
        None => "not told",
    };
    format!(
        "<tr><td class=\"k\">{}</td><td class=\"k {class}\">{sign}{}</td><td class=\"k\">{born}</td><td class=\"n\">{}</td>\
         <td class=\"n\">{}</td><td class=\"n\">{share}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{weight}</td>\
         <td>{programmed}</td></tr>\n",
        escape(&std::net::SocketAddr::new(endpoint.addr, endpoint.port).to_string()),
        escape(&status),
        thousands(endpoint.window_connects),
        compact(endpoint.window_expected),
        thousands(endpoint.connects),
        thousands(endpoint.open),
    )
}

/// Evenness with its sample sizes, and the facts beside it.
pub(super) fn numbers(diagnosis: &DiagnosisView) -> String {
    let mut out = String::from("<div class=\"two\">\n<div class=\"scroll\">\n<h3>Evenness</h3>\n");
    out.push_str(
        "<table>\n<tr><th>Of</th><th class=\"n\">n</th><th class=\"n\">k</th><th class=\"n\">max/mean</th>\
         <th class=\"n\">CV</th><th class=\"n\">Dispersion</th><th class=\"n\">By chance</th><th>So</th></tr>\n",
    );
    for (name, view) in [
        ("new, last minute", diagnosis.new_connections),
        ("new, since start", diagnosis.new_since_start),
        ("open now", diagnosis.open_connections),
    ] {
        out.push_str(&evenness(name, view.as_ref()));
    }
    out.push_str("</table>\n</div>\n<div class=\"scroll\">\n<h3>Beside it</h3>\n<table>\n");
    for (name, value) in facts(diagnosis) {
        let _infallible = writeln!(
            out,
            "<tr><td class=\"soft k\">{}</td><td class=\"any\">{}</td></tr>",
            escape(name),
            escape(&value)
        );
    }
    out.push_str("</table>\n</div>\n</div>\n");
    out
}

fn evenness(name: &str, view: Option<&ImbalanceView>) -> String {
    let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), compact);
    let Some(view) = view else {
        return format!(
            "<tr><td class=\"k\">{name}</td><td class=\"n\">0</td>{}<td>nothing counted</td></tr>\n",
            "<td class=\"n\">–</td>".repeat(5)
        );
    };
    let (class, word) = match (view.insufficient, view.alarm) {
        (true, _) => ("soft", "insufficient"),
        (false, true) => ("starved", "beyond chance"),
        (false, false) => ("", "no alarm"),
    };
    let by_chance = chance(view.p);
    format!(
        "<tr><td class=\"k\">{name}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
         <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"k {class}\">{word}</td></tr>\n",
        thousands(view.n),
        view.backends,
        number(view.max_over_mean),
        number(view.cv),
        number(view.dispersion),
        if view.insufficient { "–".to_owned() } else { by_chance },
    )
}

fn facts(diagnosis: &DiagnosisView) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    let seen = diagnosis.attribution;
    facts.push((
        "Connections",
        format!(
            "{} to the Service, {} of them from outside; of {} the endpoint was seen, of {} not; {} straight to endpoints; {} from before the agent",
            thousands(seen.connects),
            thousands(seen.outside),
            thousands(seen.attributed),
            thousands(seen.unknown),
            thousands(seen.direct),
            thousands(seen.earlier)
        ),
    ));
    let against = |share: Option<f64>, chance: Option<f64>| match (share, chance) {
        (Some(share), Some(chance)) => format!("{}; chance alone would give {}", percent(share), percent(chance)),
        (Some(share), None) => percent(share),
        (None, _) => "not known".to_owned(),
    };
    if let Some(reuse) = &diagnosis.reuse {
        facts.push((
            "Port reuse",
            format!(
                "{} of {} connections; the same endpoint again: {}",
                thousands(reuse.total),
                thousands(reuse.connections),
                against(reuse.same_share, reuse.expected_same_share)
            ),
        ));
    }
    if let Some(clients) = &diagnosis.clients {
        facts.push((
            "Clients",
            format!(
                "{}; the same endpoint as the time before: {}",
                thousands(clients.clients),
                against(clients.same_share, clients.expected_same_share)
            ),
        ));
    }
    if !diagnosis.failed.is_empty() {
        let reasons: Vec<String> = diagnosis
            .failed
            .iter()
            .map(|(reason, count)| format!("{} {reason}", thousands(*count)))
            .collect();
        facts.push(("Failed", reasons.join(", ")));
    }
    if let Some(latency) = &diagnosis.latency {
        let at_most = |value: Option<f64>| {
            value.map_or_else(
                || "beyond the last edge".to_owned(),
                |s| format!("≤ {} ms", compact(s * 1e3)),
            )
        };
        facts.push((
            "Time to connect",
            format!(
                "half {}, 99 % {} (n = {})",
                at_most(latency.p50_seconds),
                at_most(latency.p99_seconds),
                thousands(latency.n)
            ),
        ));
    }
    if let Some(ports) = &diagnosis.ports {
        facts.push((
            "Source ports",
            format!(
                "{} uses {} of {} ports ({}) towards {}",
                ports.client,
                thousands(ports.used),
                thousands(ports.range),
                percent(ports.ratio),
                ports.destination
            ),
        ));
    }
    facts
}

/// The node's settings.
pub(super) fn node(node: &NodeFactsView) -> String {
    let mut rows = String::new();
    for setting in &node.settings {
        let _infallible = writeln!(
            rows,
            "<tr><td class=\"any\">{}</td><td class=\"n\">{}</td><td class=\"any\">{}</td></tr>",
            escape(&setting.name),
            escape(setting.value.as_deref().unwrap_or("not there")),
            escape(setting.advice.as_deref().unwrap_or("")),
        );
    }
    let proxy = match (&node.proxy, &node.proxy_trace) {
        (Some(proxy), Some(trace)) => format!("Proxy: {proxy}, recognised by {trace}."),
        (Some(proxy), None) => format!("Proxy: {proxy}."),
        (None, _) => "Nobody was found who translates Services here.".to_owned(),
    };
    let table = if rows.is_empty() {
        String::new()
    } else {
        format!(
            "<div class=\"scroll\"><table>\n<tr><th>Setting</th><th class=\"n\">Value</th><th>What follows</th></tr>\n{rows}</table></div>\n"
        )
    };
    format!(
        "<section>\n<h3>The node's settings</h3>\n<p>{}</p>\n{table}</section>\n",
        escape(&proxy)
    )
}
