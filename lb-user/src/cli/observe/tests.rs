use super::*;
use crate::{
    cli::output::ColorChoice,
    view::{Answers, ServiceFilter, Timestamp, fixture::Fixture},
};

fn output(format: Format, color: ColorChoice) -> Output {
    Output::new(format, true, color)
}

/// A connection, a reuse, a refused connection whose endpoint was not seen, an alarm, and a note of loss.
fn events() -> Vec<EventView> {
    let mut reader = Fixture { ready: true }
        .follow(&ServiceFilter::default())
        .expect("the fixture has events");
    let mut events: Vec<EventView> = std::iter::from_fn(|| reader.try_recv().ok()).collect();
    events.push(EventView::Lost {
        time: Timestamp::from_unix_millis(1_790_000_000_000),
        events: 1_200,
    });
    events
}

/// Which of the events pass.
fn passed(filter: &Filter) -> Vec<usize> {
    let events = events();
    (0..events.len())
        .filter(|&index| filter.admits(&events[index]))
        .collect()
}

fn target(text: &str) -> Target {
    filter::parse_target(text).expect("an address")
}

fn client(text: &str) -> Client {
    filter::parse_client(text).expect("a client")
}

#[test]
fn events_are_lines_for_people() {
    let mut all: String = events()
        .iter()
        .map(|event| line(event, output(Format::Table, ColorChoice::Never)))
        .collect();
    let mut over = events();
    if let EventView::Alarm { raised, seen, .. } = &mut over[3] {
        (*raised, *seen) = (false, 210);
    }
    if let EventView::Connection {
        client, outcome, errno, ..
    } = &mut over[2]
    {
        client.set_port(0);
        *errno = Some(99);
        "no_local_port".clone_into(outcome);
    }
    for event in &over[2..4] {
        all.push_str(&line(event, output(Format::Table, ColorChoice::Never)));
    }
    insta::assert_snapshot!("lines", all);
}

#[test]
fn failures_and_alarms_have_colours() {
    let painted: Vec<String> = events()
        .iter()
        .map(|event| line(event, output(Format::Table, ColorChoice::Always)))
        .collect();
    let codes: Vec<&str> = painted.iter().map(|line| line.get(..5).unwrap_or_default()).collect();
    assert_eq!(codes, ["2026-", "2026-", "\x1b[31m", "\x1b[31m", "\x1b[33m"]);
}

#[test]
fn a_control_character_does_not_reach_the_terminal() {
    let mut event = events().remove(0);
    if let EventView::Connection { service, .. } = &mut event {
        "a\x1b[2J\nb".clone_into(service);
    }
    let said = line(&event, output(Format::Table, ColorChoice::Never));
    assert!(
        said.contains("a\u{fffd}[2J\u{fffd}b") && said.lines().count() == 1,
        "{said}"
    );
}

#[test]
fn without_a_filter_all_pass_and_a_note_of_loss_always_does() {
    assert_eq!(passed(&Filter::default()), [0, 1, 2, 3, 4]);
    let nobody = Filter {
        services: ServiceFilter {
            namespace: Some("nowhere".into()),
            name: None,
        },
        ..Filter::default()
    };
    assert_eq!(passed(&nobody), [4]);
}

#[test]
fn each_filter_passes_what_it_names() {
    for (filter, wanted) in [
        (
            Filter {
                services: backend::filter(Some(&ObjectName::new("shop", "web")), None),
                ..Filter::default()
            },
            &[0, 1, 2, 3, 4][..],
        ),
        (
            Filter {
                services: backend::filter(Some(&ObjectName::new("shop", "api")), None),
                ..Filter::default()
            },
            &[4],
        ),
        (
            Filter {
                backend: Some(target("10.244.1.5")),
                ..Filter::default()
            },
            &[0, 4],
        ),
        (
            Filter {
                backend: Some(target("::ffff:10.244.1.5")),
                ..Filter::default()
            },
            &[0, 4],
        ),
        (
            Filter {
                backend: Some(target("10.244.1.5:8080")),
                ..Filter::default()
            },
            &[0, 4],
        ),
        (
            Filter {
                backend: Some(target("10.244.1.5:8081")),
                ..Filter::default()
            },
            &[4],
        ),
        (
            Filter {
                backend: Some(target("[fd00::7]:8080")),
                ..Filter::default()
            },
            &[3, 4],
        ),
        (
            Filter {
                client: Some(client("10.244.1.9")),
                ..Filter::default()
            },
            &[0, 1, 4],
        ),
        (
            Filter {
                origin: Some(Origin::Outside),
                ..Filter::default()
            },
            &[2, 4],
        ),
        (
            Filter {
                origin: Some(Origin::Node),
                ..Filter::default()
            },
            &[0, 1, 4],
        ),
        (
            Filter {
                client: Some(client("198.51.100.7:40002")),
                ..Filter::default()
            },
            &[2, 4],
        ),
        (
            Filter {
                client: Some(client("10.244.1.8")),
                ..Filter::default()
            },
            &[4],
        ),
        (
            Filter {
                client: Some(client("shop/nginx")),
                ..Filter::default()
            },
            &[0, 4],
        ),
        (
            Filter {
                client: Some(client("nginx")),
                ..Filter::default()
            },
            &[0, 4],
        ),
        (
            Filter {
                client: Some(client("default/nginx")),
                ..Filter::default()
            },
            &[4],
        ),
        (
            Filter {
                client: Some(client("ginx")),
                ..Filter::default()
            },
            &[4],
        ),
        (
            Filter {
                outcomes: vec![Outcome::Established],
                ..Filter::default()
            },
            &[0, 4],
        ),
        (
            Filter {
                outcomes: vec![Outcome::Failed],
                ..Filter::default()
            },
            &[2, 4],
        ),
        (
            Filter {
                outcomes: vec![Outcome::Refused, Outcome::SameBackend],
                ..Filter::default()
            },
            &[1, 2, 4],
        ),
        (
            Filter {
                outcomes: vec![Outcome::TimedOut],
                ..Filter::default()
            },
            &[4],
        ),
        (
            Filter {
                kinds: vec![Kind::Alarm],
                ..Filter::default()
            },
            &[3, 4],
        ),
        (
            Filter {
                kinds: vec![Kind::Connection, Kind::Reuse],
                ..Filter::default()
            },
            &[0, 1, 2, 4],
        ),
        // Of different kinds all must hold.
        (
            Filter {
                client: Some(client("198.51.100.7")),
                outcomes: vec![Outcome::Refused],
                kinds: vec![Kind::Connection],
                ..Filter::default()
            },
            &[2, 4],
        ),
        (
            Filter {
                client: Some(client("nginx")),
                outcomes: vec![Outcome::Refused],
                ..Filter::default()
            },
            &[4],
        ),
        (
            Filter {
                backend: Some(target("10.244.1.5")),
                kinds: vec![Kind::Alarm],
                ..Filter::default()
            },
            &[4],
        ),
    ] {
        assert_eq!(passed(&filter), wanted, "{filter:?}");
    }
}

#[test]
fn every_outcome_has_the_name_that_events_use() {
    use clap::ValueEnum;
    for outcome in Outcome::value_variants() {
        let name = outcome
            .to_possible_value()
            .expect("none is hidden")
            .get_name()
            .to_owned();
        let mut event = events().remove(usize::from(*outcome as u8 >= Outcome::SameBackend as u8));
        match &mut event {
            EventView::Connection { outcome: found, .. } | EventView::Reuse { outcome: found, .. } => {
                // `failed` stands for several.
                if name == "failed" { "other" } else { &name }.clone_into(found);
            }
            _ => unreachable!("the first two are a connection and a reuse"),
        }
        let filter = Filter {
            outcomes: vec![*outcome],
            ..Filter::default()
        };
        assert!(filter.admits(&event), "{name}");
    }
}

#[test]
fn names_that_are_none_are_refused() {
    for bad in ["", "10.0.0.300", "10.0.0.1:0", "10.0.0.1:70000", "web", "fd00::7:"] {
        let said = filter::parse_target(bad).expect_err(bad);
        assert!(said.contains("ADDR:PORT"), "{said}");
    }
    for bad in ["", "10.0.0.300", "A/b", "a/b/c", "10.0.0.1:0"] {
        let said = filter::parse_client(bad).expect_err(bad);
        assert!(said.contains("NAMESPACE/NAME"), "{said}");
    }
}

/// Replays a text; what is printed, what is complained of, and how many lines were bad.
fn replayed(text: &str, filter: &Filter, bounds: replay::Bounds, format: Format) -> (String, String, u64) {
    let mut printer = Printer::new(Vec::new(), output(format, ColorChoice::Never));
    let mut complaints = Vec::new();
    let bad = replay::replay(
        "events.jsonl",
        text.as_bytes(),
        filter,
        bounds,
        &mut printer,
        &mut complaints,
    )
    .expect("a text can be read");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (text(printer.out), text(complaints), bad)
}

fn written() -> String {
    let mut printer = Printer::new(Vec::new(), output(Format::Json, ColorChoice::Never));
    for event in events() {
        assert_eq!(printer.print(&event).expect("a vector takes all"), Gone::No);
    }
    String::from_utf8(printer.out).expect("text")
}

#[test]
fn what_json_writes_a_replay_reads() {
    let text = written();
    assert_eq!(text.lines().count(), 5);
    assert!(
        text.lines()
            .all(|line| line.starts_with(r#"{"schemaVersion":1,"kind":"Event","event":"#)),
        "{text}"
    );
    let again = replayed(&text, &Filter::default(), replay::Bounds::default(), Format::Json);
    assert_eq!(again, (text, String::new(), 0));
}

#[test]
fn a_bad_line_is_named_and_the_others_are_shown() {
    let good = written();
    let lines: Vec<&str> = good.lines().collect();
    let long = format!("\"{}\"", "x".repeat(2 * 1024 * 1024));
    let text = [
        lines[0],
        "not JSON",
        "",
        r#"{"kind":"Event"}"#,
        r#"{"schemaVersion":2,"kind":"Event"}"#,
        r#"{"schemaVersion":1,"kind":"Status"}"#,
        r#"{"schemaVersion":1,"kind":"Event","event":"party"}"#,
        r#"{"schemaVersion":1,"kind":"Event","event":"lost","time":"yesterday","events":1}"#,
        &long,
        lines[3],
    ]
    .join("\n");
    let (shown, complaints, bad) = replayed(&text, &Filter::default(), replay::Bounds::default(), Format::Json);
    assert_eq!(shown.lines().collect::<Vec<_>>(), [lines[0], lines[3]]);
    assert_eq!(bad, 7);
    insta::assert_snapshot!("complaints", complaints);
}

#[test]
fn a_replay_can_be_cut_at_either_end() {
    let text = written();
    let lines: Vec<&str> = text.lines().collect();
    let cut = |count, last| {
        let (shown, complaints, bad) =
            replayed(&text, &Filter::default(), replay::Bounds { count, last }, Format::Json);
        assert_eq!((complaints.as_str(), bad), ("", 0));
        shown
    };
    assert_eq!(cut(Some(2), None).lines().collect::<Vec<_>>(), lines[..2]);
    assert_eq!(cut(None, Some(2)).lines().collect::<Vec<_>>(), lines[3..]);
    assert_eq!(cut(None, Some(99)), text);
}

#[test]
fn a_reader_that_went_away_ends_the_printing() {
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut printer = Printer::new(Closed, output(Format::Table, ColorChoice::Never));
    assert_eq!(printer.print(&events()[0]).expect("no error"), Gone::Yes);
}
