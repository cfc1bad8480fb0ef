//! How answers are printed: as tables, as JSON or YAML, or as names.

use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;

use super::{Failure, backend, conn, diagnose, explain, graph, map, observe, report, reuse, service, status, table};
use crate::view::{Answer, Document};

/// What `--output` takes: the forms of every verb, and those that only `graph` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Chosen {
    /// Columns for people.
    Table,
    /// More columns.
    Wide,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
    /// One name a line.
    Name,
    /// A Graphviz digraph; `graph` alone.
    #[value(hide = true)]
    Dot,
    /// Istio Sidecars; `graph` alone.
    #[value(hide = true)]
    IstioSidecar,
}

/// The forms that only `graph` writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Picture {
    /// A Graphviz digraph.
    Dot,
    /// Istio Sidecars.
    IstioSidecar,
}

impl Chosen {
    /// Parts the forms of every verb from those of `graph`.
    pub(super) fn split(self) -> (Format, Option<Picture>) {
        match self {
            Self::Table => (Format::Table, None),
            Self::Wide => (Format::Wide, None),
            Self::Json => (Format::Json, None),
            Self::Yaml => (Format::Yaml, None),
            Self::Name => (Format::Name, None),
            Self::Dot => (Format::Table, Some(Picture::Dot)),
            Self::IstioSidecar => (Format::Yaml, Some(Picture::IstioSidecar)),
        }
    }
}

impl Picture {
    /// What another verb says to it.
    pub(super) fn refused(self) -> Failure {
        let word = match self {
            Self::Dot => "dot",
            Self::IstioSidecar => "istio-sidecar",
        };
        Failure::Usage(format!(
            "--output {word}: only `evenkeel graph` writes this; allowed here are table, wide, json, yaml and name"
        ))
    }
}

/// The forms of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Columns for people.
    Table,
    /// More columns.
    Wide,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
    /// One name a line.
    Name,
}

/// When to colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The chosen form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    pub(super) format: Format,
    pub(super) headers: bool,
    pub(super) color: bool,
}

impl Output {
    /// Settles the form; looks at the environment and the terminal for `auto`.
    pub(super) fn new(format: Format, headers: bool, color: ColorChoice) -> Self {
        let color = match color {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => {
                io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            }
        };
        Self { format, headers, color }
    }

    /// True for the forms that people read.
    pub(super) fn for_people(self) -> bool {
        matches!(self.format, Format::Table | Format::Wide)
    }

    /// Prints an answer.
    pub(super) fn print(self, answer: &Answer) -> Result<(), Failure> {
        write(&self.render(answer)?)
    }

    /// Writes an answer in the chosen form.
    pub(super) fn render(self, answer: &Answer) -> Result<String, Failure> {
        match self.format {
            Format::Table | Format::Wide => Ok(self.people(answer)),
            Format::Json | Format::Yaml => self.document(&Document::from(answer.clone())),
            Format::Name => names(answer),
        }
    }

    /// Writes any document in JSON or YAML.
    pub(super) fn document<T: serde::Serialize>(self, document: &T) -> Result<String, Failure> {
        if self.format == Format::Yaml {
            serde_saphyr::to_string(document)
                .map(|text| text.trim_end().to_owned() + "\n")
                .map_err(|error| anyhow::Error::from(error).into())
        } else {
            serde_json::to_string_pretty(document)
                .map(|text| text + "\n")
                .map_err(|error| anyhow::Error::from(error).into())
        }
    }

    fn people(self, answer: &Answer) -> String {
        let wide = self.format == Format::Wide;
        match answer {
            Answer::Status(view) => status::text(view, self),
            Answer::ServiceList { items } => service::list(items, wide).render(self.headers, self.color),
            Answer::Service(view) => service::describe(view, self),
            Answer::BackendList { items } => backend::list(items, wide).render(self.headers, self.color),
            Answer::ConnList(view) => conn::list(view, wide, self),
            Answer::Reuse(view) => reuse::text(view, self),
            Answer::TableList { items } => table::text(items, self),
            Answer::Explain(view) => explain::text(view, self),
            Answer::MapList { items } => map::list(items, wide).render(self.headers, self.color),
            Answer::MapDump(view) => map::dump(view, self),
            Answer::DiagnosisList { node, items } => diagnose::text(node, items, self),
            Answer::Report(view) => report::text(view, self),
            Answer::Graph(view) => graph::text(view, self),
            Answer::Event(view) => observe::line(view, self),
            Answer::Error(error) => format!("{error}\n"),
        }
    }
}

/// One name a line, as `kubectl -o name` has them: the kind, then the name.
fn names(answer: &Answer) -> Result<String, Failure> {
    let lines: Vec<String> = match answer {
        Answer::ServiceList { items } => items
            .iter()
            .map(|item| format!("service/{}/{}", item.namespace, item.name))
            .collect(),
        Answer::Service(item) => vec![format!("service/{}/{}", item.namespace, item.name)],
        Answer::BackendList { items } => items
            .iter()
            .map(|item| {
                format!(
                    "backend/{}/{}",
                    super::grid::endpoint(item.addr, item.port),
                    item.protocol
                )
            })
            .collect(),
        Answer::ConnList(view) => view.items.iter().map(conn::name).collect(),
        Answer::TableList { items } => items
            .iter()
            .map(|item| format!("table/{}/{}/{}", item.namespace, item.service, item.set))
            .collect(),
        Answer::DiagnosisList { items, .. } => items
            .iter()
            .map(|item| format!("diagnosis/{}/{}/{}", item.namespace, item.service, item.set))
            .collect(),
        Answer::MapList { items } => items.iter().map(|item| format!("map/{}", item.name)).collect(),
        _ => {
            return Err(Failure::Usage(
                "--output name: this verb lists nothing that has a name; allowed are table, wide, json and yaml"
                    .to_owned(),
            ));
        }
    };
    Ok(one_a_line(lines))
}

/// Ends each text with a line break.
pub(super) fn one_a_line(texts: impl IntoIterator<Item = String>) -> String {
    texts.into_iter().map(|text| text + "\n").collect()
}

/// Writes to standard output; a reader that went away (`| head`) is no error.
pub(super) fn write(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow::Error::from(error).context("standard output").into())
        }
        _ => Ok(()),
    }
}
