use clap::CommandFactory;

use super::{
    output::{ColorChoice, Format, Output},
    *,
};
use crate::view::{Answers, ConnFilter, Document, ExplainQuery, ServiceFilter, Whence, fixture::Fixture};

const AGENT: Fixture = Fixture { ready: true };

fn output(format: Format) -> Output {
    Output::new(format, true, ColorChoice::Never)
}

/// An answer to every kind of query, with a name for its snapshot.
fn answers() -> Vec<(&'static str, Answer)> {
    let (namespace, name) = ("shop".to_owned(), "web".to_owned());
    let filter = ServiceFilter::default();
    [
        ("status", Query::Status {}),
        ("services", Query::Services { filter: filter.clone() }),
        (
            "service",
            Query::Service {
                namespace: namespace.clone(),
                name: name.clone(),
            },
        ),
        ("backends", Query::Backends { filter: filter.clone() }),
        (
            "conns",
            Query::Conns {
                filter: filter.clone(),
                which: ConnFilter {
                    limit: 5,
                    ..ConnFilter::default()
                },
            },
        ),
        ("reuse", Query::Reuse { filter: filter.clone() }),
        ("diagnose", Query::Diagnose { filter: filter.clone() }),
        ("graph", Query::Graph { filter }),
        ("table", Query::Table { namespace, name }),
        (
            "explain",
            Query::Explain {
                source: [10, 244, 0, 9].into(),
                source_port: None,
                vip: ([10, 96, 7, 7], 80).into(),
                protocol: "TCP".into(),
                from: None,
            },
        ),
        (
            "explain_outside",
            Query::Explain {
                source: [198, 51, 100, 7].into(),
                source_port: Some(51_000),
                vip: ([192, 0, 2, 4], 30_080).into(),
                protocol: "TCP".into(),
                from: Some(Whence::Outside),
            },
        ),
        ("maps", Query::Maps {}),
        (
            "map_dump",
            Query::MapDump {
                name: "frontends".into(),
            },
        ),
    ]
    .map(|(name, query)| (name, query.ask(&AGENT).expect("the fixture answers everything")))
    .into()
}

#[test]
fn tables_are_for_eyes() {
    for (name, answer) in answers() {
        let text = output(Format::Table).render(&answer).expect("a table");
        insta::assert_snapshot!(format!("table_{name}"), text);
        assert!(
            text.lines().all(|line| line == line.trim_end()),
            "{name}: trailing blanks"
        );
        assert!(!text.contains('\x1b'), "{name}: colours");
    }
    for (name, answer) in answers() {
        if ["services", "backends", "conns", "maps"].contains(&name) {
            let text = output(Format::Wide).render(&answer).expect("a table");
            insta::assert_snapshot!(format!("wide_{name}"), text);
        }
    }
}

#[test]
fn json_is_a_contract() {
    for (name, answer) in answers() {
        let text = output(Format::Json).render(&answer).expect("JSON");
        assert!(text.starts_with("{\n  \"schemaVersion\": 1,\n  \"kind\": "), "{name}");
        insta::assert_snapshot!(format!("json_{name}"), text);
    }
}

#[test]
fn yaml_says_what_json_says() {
    for (name, answer) in answers() {
        let yaml = output(Format::Yaml).render(&answer).expect("YAML");
        let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml).expect("YAML");
        let direct = serde_json::to_value(Document::from(answer)).expect("JSON");
        assert_eq!(from_yaml, direct, "{name}");
        assert!(yaml.ends_with('\n') && !yaml.ends_with("\n\n"), "{name}");
    }
}

#[test]
fn names_are_one_a_line_or_refused() {
    let mut all = String::new();
    for (name, answer) in answers() {
        match output(Format::Name).render(&answer) {
            Ok(text) => all.push_str(&text),
            Err(failure) => {
                assert_eq!(failure.code(), 2, "{name}");
                assert!(
                    ["status", "reuse", "graph", "explain", "explain_outside", "map_dump"].contains(&name),
                    "{name}"
                );
            }
        }
    }
    insta::assert_snapshot!("names", all);
}

#[test]
fn headers_and_colours_can_be_had_and_left() {
    let services = Answer::ServiceList {
        items: AGENT.services(&ServiceFilter::default()).expect("two"),
    };
    let bare = Output::new(Format::Table, false, ColorChoice::Never);
    assert!(!bare.render(&services).expect("a table").contains("NAMESPACE"));
    let coloured = Output::new(Format::Table, true, ColorChoice::Always)
        .render(&services)
        .expect("a table");
    // The starved Service in red, the one without usable backends in yellow.
    assert!(
        coloured.contains("\x1b[31mshop") && coloured.contains("\x1b[33mdefault"),
        "{coloured}"
    );
}

#[test]
fn a_table_survives_an_agent_with_nothing() {
    let mut status = AGENT.status().expect("a status");
    status.programs.clear();
    status.maps.clear();
    status.problems.clear();
    status.source.kinds.clear();
    status.sync.last_applied = None;
    for answer in [
        Answer::Status(Box::new(status)),
        Answer::ServiceList { items: vec![] },
        Answer::BackendList { items: vec![] },
        Answer::TableList { items: vec![] },
        Answer::MapList { items: vec![] },
    ] {
        output(Format::Table).render(&answer).expect("a table");
    }
    let mut explain = AGENT
        .explain(&ExplainQuery {
            source: [10, 244, 0, 9].into(),
            source_port: None,
            vip: ([10, 96, 7, 7], 80).into(),
            protocol: crate::model::Protocol::Tcp,
            from: None,
        })
        .expect("an explanation");
    explain.candidates.clear();
    explain.service = None;
    explain.verdict = crate::view::Verdict::Passed;
    let text = output(Format::Table).render(&Answer::Explain(explain)).expect("text");
    assert!(text.starts_with("10.244.0.9 → 10.96.7.7:80/TCP: passed\n"), "{text}");
}

#[test]
fn the_command_line_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_agent_flag_has_its_environment_variable() {
    let command = Cli::command();
    let agent = command.find_subcommand("agent").expect("the verb agent");
    for arg in agent.get_arguments().filter(|arg| arg.get_id() != "help") {
        let long = arg.get_long().expect("every flag has a long name");
        let wanted = format!("EVENKEEL_{}", long.to_uppercase().replace('-', "_"));
        let found = arg.get_env().map(|name| name.to_string_lossy().into_owned());
        assert_eq!(found.as_deref(), Some(wanted.as_str()), "--{long}");
    }
    let socket = command.get_arguments().find(|arg| arg.get_long() == Some("socket"));
    assert!(socket.is_some_and(|arg| arg.get_env().is_some()));
}

#[test]
fn every_verb_has_help_with_examples() {
    let mut command = Cli::command().term_width(100);
    command.build();
    let mut pages = vec![String::new()];
    let mut text = command.clone().render_long_help().to_string();
    while let Some(page) = pages.pop() {
        let mut found = &mut command;
        for verb in page.split_whitespace() {
            found = found.find_subcommand_mut(verb).expect("a verb that was listed");
        }
        for verb in found.get_subcommands().map(|verb| verb.get_name().to_owned()) {
            pages.push(format!("{page} {verb}"));
        }
        if !page.is_empty() {
            let help = found.clone().term_width(100).render_long_help().to_string();
            assert!(help.contains("Example"), "evenkeel{page}: no example");
            text.extend(["\n=== evenkeel", &page, "\n", &help]);
        }
    }
    // The environment of whoever runs the tests is not part of the help.
    let stable: String = text
        .lines()
        .map(|line| match line.split_once("[env: ") {
            Some((before, after)) => {
                let name = after.split('=').next().unwrap_or_default();
                format!("{before}[env: {name}=]\n")
            }
            None => format!("{}\n", line.trim_end()),
        })
        .collect();
    insta::assert_snapshot!("help", stable);
}

#[test]
fn exit_codes_follow_the_cause() {
    let io = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let path = PathBuf::from("/run/x");
    for (failure, code) in [
        (Failure::Usage("x".into()), 2),
        (Failure::Ask(QueryError::Invalid("x".into()).into()), 2),
        (Failure::Ask(QueryError::NotFound("x".into()).into()), 1),
        (Failure::Ask(QueryError::NotReady("x".into()).into()), 1),
        (
            Failure::Ask(AskError::Unreachable {
                path: path.clone(),
                source: io(),
            }),
            3,
        ),
        (
            Failure::Ask(AskError::Lost {
                path: path.clone(),
                source: io(),
            }),
            3,
        ),
        (
            Failure::Ask(AskError::Garbled {
                path,
                message: "x".into(),
            }),
            1,
        ),
        (Failure::Other(anyhow::anyhow!("x")), 1),
    ] {
        assert_eq!(failure.code(), code, "{failure}");
    }
}
