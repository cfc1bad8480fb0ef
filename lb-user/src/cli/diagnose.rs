//! `evenkeel diagnose`: why load is uneven, in sentences, with the numbers under them and the advice last.

mod numbers;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use clap::Args;

use super::{
    Context, Failure, Found,
    backend::filter,
    grid::{Grid, Tone, endpoint},
    output::{self, Output},
};
use crate::{
    control::AskError,
    model::ObjectName,
    view::{
        Answer, DiagnosisView, NodeFactsView, Query, QueryError, StarvedView, VerdictKind, parse_service_name,
        wording::numbers::{count, counted, seconds},
    },
};

/// Say which endpoint is starved, since when, how sure that is, and why
#[derive(Debug, Args)]
#[command(
    after_help = "Without a SERVICE: one line for each Service with traffic, the worst first, and the whole of those that \
    are starved or uneven. Exits with 1 if any is.\n\nExamples:\n  \
    evenkeel diagnose\n  \
    evenkeel diagnose shop/web\n  \
    evenkeel diagnose -n shop --all\n  \
    evenkeel diagnose shop/web -o json"
)]
pub(super) struct DiagnoseArgs {
    /// Only this Service, in full: NAME (in `default`) or NAMESPACE/NAME
    #[arg(value_name = "SERVICE", value_parser = parse_service_name, conflicts_with_all = ["namespace", "all"])]
    service: Option<ObjectName>,
    /// Only Services of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Show every Service in full, those without traffic too
    #[arg(long)]
    all: bool,
}

/// How much is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Detail {
    /// A line each, and the whole of those that are not even.
    Overview,
    /// The whole of each.
    Full,
}

pub(super) fn run(args: &DiagnoseArgs, context: &Context) -> Result<Found, Failure> {
    let answer = context.ask(&Query::Diagnose {
        filter: filter(args.service.as_ref(), args.namespace.as_deref()),
    })?;
    let Answer::DiagnosisList { node, items } = &answer else {
        context.output.print(&answer)?;
        return Ok(Found::Problem);
    };
    if let (Some(name), true) = (&args.service, items.is_empty()) {
        let missing = QueryError::NotFound(format!("Service {}/{}", name.namespace, name.name));
        return Err(AskError::Refused(missing).into());
    }
    if context.output.for_people() {
        let detail = if args.all || args.service.is_some() {
            Detail::Full
        } else {
            Detail::Overview
        };
        output::write(&page(node, items, detail, context.output))?;
    } else {
        context.output.print(&answer)?;
    }
    Ok(if items.iter().any(|item| is_bad(item.verdict)) {
        Found::Problem
    } else {
        Found::Fine
    })
}

/// Writes the diagnoses for people, as `diagnose` without a Service does.
pub(super) fn text(node: &NodeFactsView, items: &[DiagnosisView], output: Output) -> String {
    page(node, items, Detail::Overview, output)
}

fn is_bad(verdict: VerdictKind) -> bool {
    matches!(verdict, VerdictKind::Starved | VerdictKind::Uneven)
}

fn page(node: &NodeFactsView, items: &[DiagnosisView], detail: Detail, output: Output) -> String {
    let mut sorted: Vec<&DiagnosisView> = items.iter().collect();
    sorted.sort_by_key(|item| item.verdict);
    let mut out = String::new();
    let mut full: Vec<&DiagnosisView> = sorted.clone();
    if detail == Detail::Overview {
        full.retain(|item| is_bad(item.verdict));
        overview(&sorted, output, &mut out);
    }
    for item in &full {
        separate(&mut out);
        heading(item, output, &mut out);
        for sentence in &item.sentences {
            paragraph(sentence, "  ", "  ", &mut out);
        }
        facts(item, &mut out);
        numbers::write(item, node.time, output, &mut out);
    }
    separate(&mut out);
    node_facts(node, &mut out);
    advice(&full, &mut out);
    out
}

/// A line for each Service with traffic.
fn overview(sorted: &[&DiagnosisView], output: Output, out: &mut String) {
    let mut grid = Grid::new(&["VERDICT", "SERVICE", "SET", ">NEW/MIN", ">STARVED", "CAUSE"]);
    let busy: Vec<_> = sorted
        .iter()
        .filter(|item| item.verdict != VerdictKind::NoTraffic)
        .collect();
    for item in &busy {
        let mut causes: Vec<&str> = item.starved.iter().map(|found| found.cause.as_str()).collect();
        causes.sort_unstable();
        causes.dedup();
        grid.row(
            tone(item.verdict),
            [
                verdict_word(item.verdict).to_owned(),
                format!("{}/{}", item.namespace, item.service),
                item.set.clone(),
                item.new_connections.map_or_else(String::new, |found| count(found.n)),
                format!("{} of {}", item.starved.len(), eligible(item)),
                causes.join(","),
            ],
        );
    }
    let idle = (sorted.len() - busy.len()) as u64;
    if sorted.is_empty() {
        out.push_str("There is no Service here.\n");
    } else if busy.is_empty() {
        out.push_str("No connection to a Service was seen.\n");
    } else {
        out.push_str(&grid.render(output.headers, output.color));
    }
    if idle > 0 {
        // Writing into a String cannot fail.
        let _infallible = writeln!(
            out,
            "{} without traffic not shown; `--all` shows {}.",
            counted(idle, "backend set"),
            if idle == 1 { "it" } else { "them" }
        );
    }
}

/// Endpoints that may get connections on this node.
fn eligible(item: &DiagnosisView) -> usize {
    item.endpoints.iter().filter(|found| found.excluded.is_none()).count()
}

/// The facts behind the alarms that no sentence of the verdict has said already; those that several share are said once.
fn facts(item: &DiagnosisView, out: &mut String) {
    let mut groups: Vec<(Vec<&str>, Vec<&StarvedView>)> = Vec::new();
    for found in &item.starved {
        let unsaid = |fact: &&str| !item.sentences.iter().any(|sentence| sentence.contains(fact));
        let facts: Vec<&str> = found.because.iter().map(String::as_str).filter(unsaid).collect();
        if facts.is_empty() {
            continue;
        }
        match groups.iter_mut().find(|(known, _)| *known == facts) {
            Some((_, of)) => of.push(found),
            None => groups.push((facts, vec![found])),
        }
    }
    for (facts, of) in groups {
        let named: Vec<String> = of
            .iter()
            .take(3)
            .map(|found| format!("{} ({})", endpoint(found.addr, found.port), found.cause))
            .collect();
        let more = match of.len().saturating_sub(named.len()) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        out.push('\n');
        paragraph(&format!("Why {}{more}:", named.join(", ")), "  ", "  ", out);
        for fact in facts {
            paragraph(fact, "  - ", "    ", out);
        }
    }
}

fn heading(item: &DiagnosisView, output: Output, out: &mut String) {
    let line = format!("{}: {}", name(item), verdict_word(item.verdict).to_uppercase());
    let _infallible = writeln!(out, "{}", tone(item.verdict).paint(&line, output.color));
}

fn name(item: &DiagnosisView) -> String {
    format!("{}/{} {}", item.namespace, item.service, item.set)
}

fn verdict_word(verdict: VerdictKind) -> &'static str {
    match verdict {
        VerdictKind::Starved => "starved",
        VerdictKind::Uneven => "uneven",
        VerdictKind::Even => "even",
        VerdictKind::Insufficient => "too few connections",
        VerdictKind::NoTraffic => "no traffic",
    }
}

fn tone(verdict: VerdictKind) -> Tone {
    match verdict {
        VerdictKind::Starved => Tone::Bad,
        VerdictKind::Uneven => Tone::Warn,
        VerdictKind::Even => Tone::Good,
        VerdictKind::Insufficient | VerdictKind::NoTraffic => Tone::Plain,
    }
}

/// The node, and those of its settings from which something follows.
fn node_facts(node: &NodeFactsView, out: &mut String) {
    out.push_str("Node\n");
    let mut line = |label: &str, value: &str| {
        paragraph(value, &format!("  {label:<14}"), &" ".repeat(16), out);
    };
    let place = node
        .node
        .as_deref()
        .map_or_else(String::new, |name| format!("{name}, "));
    line("Where:", &format!("{place}kernel {}, {} mode", node.kernel, node.mode));
    line(
        "Counting:",
        &format!(
            "for {}, since {}",
            seconds(node.time.since(node.since).as_secs_f64()),
            node.since
        ),
    );
    let proxy = match (&node.proxy, &node.proxy_trace) {
        (Some(proxy), Some(trace)) => format!("{proxy}, recognised by {trace}"),
        (Some(proxy), None) => proxy.clone(),
        (None, _) => "no other was found".to_owned(),
    };
    line("Proxy:", &proxy);
    for place in &node.unseen {
        line("Not seen:", &format!("{place}; another proxy may hide there"));
    }
    for setting in &node.settings {
        if let Some(advice) = &setting.advice {
            let value = setting.value.as_deref().unwrap_or("absent");
            line("Setting:", &format!("{} is {value}: {advice}", setting.name));
        }
    }
    if node.events_lost > 0 {
        line(
            "Lost:",
            &format!(
                "{} between the kernel and the agent; what is derived from them is undercounted",
                counted(node.events_lost, "record")
            ),
        );
    }
}

/// The advice, said once where several sets share it.
fn advice(items: &[&DiagnosisView], out: &mut String) {
    let mut groups: Vec<(&[String], Vec<String>)> = Vec::new();
    for item in items.iter().filter(|item| !item.advice.is_empty()) {
        match groups.iter_mut().find(|(advice, _)| *advice == item.advice.as_slice()) {
            Some((_, names)) => names.push(name(item)),
            None => groups.push((&item.advice, vec![name(item)])),
        }
    }
    let several = items.len() > 1;
    for (advice, names) in groups {
        out.push('\n');
        let title = if several {
            format!("Advice for {}", names.join(", "))
        } else {
            "Advice".to_owned()
        };
        paragraph(&title, "", "  ", out);
        for (index, text) in advice.iter().enumerate() {
            paragraph(text, &format!("  {}. ", index + 1), "     ", out);
        }
    }
}

fn separate(out: &mut String) {
    if !out.is_empty() {
        out.push('\n');
    }
}

/// The width that people's terminals have at least.
const WIDTH: usize = 80;

/// Writes a text in lines of at most 80 columns, unless a single word is longer.
fn paragraph(text: &str, first: &str, rest: &str, out: &mut String) {
    let mut line = first.to_owned();
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            out.push_str(line.trim_end());
            out.push('\n');
            rest.clone_into(&mut line);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
}
