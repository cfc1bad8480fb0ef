//! `evenkeel report`: the picture of a node over time.

use std::{
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::Args;

use super::{
    Context, Failure, Found,
    backend::filter,
    output::{self, Format, Output},
};
use crate::{
    model::ObjectName,
    report,
    view::{Answer, Document, Query, ReportView, SCHEMA_VERSION, ServiceFilter, parse_service_name},
};

/// Draw the Services over time: shares, port reuse, dispersion, verdicts
#[derive(Debug, Args)]
#[command(
    after_help = "The page and the drawing stand alone: no scripts, nothing from elsewhere. FILE may be `-`.\n\nExamples:\n  \
    evenkeel report --html report.html\n  \
    evenkeel report shop/web --svg web.svg\n  \
    evenkeel report -o json > report.json\n  \
    evenkeel report --from report.json --html report.html"
)]
pub(super) struct ReportArgs {
    /// Only this Service: NAME (in `default`) or NAMESPACE/NAME
    #[arg(value_name = "SERVICE", value_parser = parse_service_name, conflicts_with = "namespace")]
    service: Option<ObjectName>,
    /// Only the Services of this namespace
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Write one self-contained page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the pictures of the worst Service, or of the one named
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Draw what `-o json` printed before, instead of asking the agent
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

pub(super) fn run(args: &ReportArgs, context: &Context) -> Result<Found, Failure> {
    let printed = match context.output.format {
        Format::Json | Format::Yaml => true,
        Format::Table => false,
        Format::Wide | Format::Name => {
            return Err(Failure::Usage(
                "--output: a report is written by --html or --svg, or printed as json or yaml".to_owned(),
            ));
        }
    };
    if !printed && args.html.is_none() && args.svg.is_none() {
        return Err(Failure::Usage(
            "report: where to? Give --html FILE or --svg FILE, or print it with -o json".to_owned(),
        ));
    }
    let filter = filter(args.service.as_ref(), args.namespace.as_deref());
    let view = match &args.from {
        Some(path) => saved(path, &filter)?,
        None => match context.ask(&Query::Report { filter })? {
            Answer::Report(view) => *view,
            other => {
                return Err(anyhow::anyhow!("the agent answered something else than a report: {other:?}").into());
            }
        },
    };
    for (path, draw) in [
        (&args.html, report::page as fn(&ReportView) -> String),
        (&args.svg, report::picture),
    ] {
        if let Some(path) = path {
            write(path, &draw(&view), view.services.len())?;
        }
    }
    if printed {
        context.output.print(&Answer::Report(Box::new(view)))?;
    }
    Ok(Found::Fine)
}

/// True for the name that means a standard stream.
fn is_stream(path: &Path) -> bool {
    path == Path::new("-")
}

/// Reads a saved document.
fn saved(path: &Path, filter: &ServiceFilter) -> Result<ReportView, Failure> {
    let mut text = String::new();
    let read = if is_stream(path) {
        io::stdin().read_to_string(&mut text).map(|_| ())
    } else {
        fs::read_to_string(path).map(|read| text = read)
    };
    read.with_context(|| format!("--from {}", path.display()))?;
    let wrong = |found: String| {
        Failure::Usage(format!(
            "--from {}: {found}; wanted what `evenkeel report -o json` prints",
            path.display()
        ))
    };
    let document: Document = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if document.schema_version != SCHEMA_VERSION {
        return Err(wrong(format!("schemaVersion {}", document.schema_version)));
    }
    let Answer::Report(mut view) = document.answer else {
        return Err(wrong("another kind of document".to_owned()));
    };
    view.services.retain(|service| {
        filter.admits(&ObjectName::new(
            &service.diagnosis.namespace,
            &service.diagnosis.service,
        ))
    });
    Ok(*view)
}

/// Writes a drawing and says so.
fn write(path: &Path, text: &str, services: usize) -> Result<(), Failure> {
    if is_stream(path) {
        return output::write(text);
    }
    fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    let noun = if services == 1 { "Service" } else { "Services" };
    let _closed_pipe = writeln!(
        io::stderr(),
        "evenkeel: wrote {} ({services} {noun}, {} KiB)",
        path.display(),
        text.len().div_ceil(1_024)
    );
    Ok(())
}

/// Writes the report for people: its diagnoses.
pub(super) fn text(view: &ReportView, output: Output) -> String {
    let items: Vec<_> = view.services.iter().map(|service| service.diagnosis.clone()).collect();
    super::diagnose::text(&view.node, &items, output)
}

#[cfg(test)]
mod tests {
    use super::{super::output::ColorChoice, *};
    use crate::report::example;

    #[test]
    fn what_is_printed_is_a_contract_and_can_be_read_again() {
        let mut report = example::fixture();
        for service in &mut report.services {
            service.points.truncate(2);
        }
        let output = Output::new(Format::Json, true, ColorChoice::Never);
        let text = output
            .render(&Answer::Report(Box::new(report.clone())))
            .expect("a document");
        insta::assert_snapshot!("json_report", text);
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), &text).expect("it is written");
        let read = saved(file.path(), &ServiceFilter::default()).expect("a report");
        assert_eq!(read, report);
        let other = ServiceFilter {
            namespace: Some("elsewhere".into()),
            name: None,
        };
        assert!(saved(file.path(), &other).expect("a report").services.is_empty());
    }
}
