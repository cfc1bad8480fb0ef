use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    style::Color,
};

use super::{
    state::{Mode, Side, Sort},
    *,
};
use crate::{
    report::example,
    view::{ReportView, VerdictKind},
};

fn loaded(report: ReportView) -> State {
    let mut state = State::new(report.node.time);
    state.take(report.node.time, Ok(Box::new(report)));
    state
}

fn key(code: KeyCode) -> KeyEvent {
    KeyEvent::new(code, KeyModifiers::NONE)
}

fn keys(state: &mut State, letters: &str) {
    for letter in letters.chars() {
        assert_eq!(state.press(key(KeyCode::Char(letter))), Step::Continue, "{letter}");
    }
}

/// The screen as a terminal shows it.
fn screen(state: &State, columns: u16, rows: u16, color: bool) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a terminal");
    terminal
        .draw(|frame| draw::screen(state, Paint { color }, frame.area(), frame.buffer_mut()))
        .expect("it draws");
    terminal
}

fn shown(state: &State, columns: u16, rows: u16) -> String {
    draw::plain(screen(state, columns, rows, false).backend().buffer())
}

fn name(state: &State) -> String {
    let rows = state.rows();
    let row = rows[state.selected(&rows)];
    format!("{}/{}", row.service.diagnosis.namespace, row.service.diagnosis.service)
}

#[test]
fn screens_of_three_sizes() {
    let state = loaded(example::busy());
    for (columns, rows) in [(80, 24), (120, 40), (40, 10)] {
        insta::assert_snapshot!(format!("busy_{columns}x{rows}"), shown(&state, columns, rows));
    }
}

#[test]
fn screens_of_other_moments() {
    let mut state = State::new(example::busy().node.time);
    insta::assert_snapshot!("waiting", shown(&state, 80, 24));
    let now = state.now;
    state.take(now, Err("no agent answers at /run/evenkeel/agent.sock".to_owned()));
    insta::assert_snapshot!("never_answered", shown(&state, 80, 24));

    let mut state = loaded(example::busy());
    keys(&mut state, "on/we");
    state.press(key(KeyCode::Enter));
    keys(&mut state, "op");
    insta::assert_snapshot!("open_filtered_paused", shown(&state, 80, 24));
    keys(&mut state, "?");
    insta::assert_snapshot!("help", shown(&state, 80, 24));

    let mut state = loaded(example::busy());
    keys(&mut state, "j");
    insta::assert_snapshot!("a_hundred_backends", shown(&state, 80, 24));
    insta::assert_snapshot!("smallest", shown(&state, 60, 16));

    let empty = ReportView {
        services: vec![],
        ..example::busy()
    };
    insta::assert_snapshot!("nothing", shown(&loaded(empty), 80, 24));
}

#[test]
fn no_size_is_too_odd() {
    let mut state = loaded(example::busy());
    let later = Timestamp::from_unix_millis(state.now.unix_millis() + 90_000_000);
    state.take(later, Err("gone".repeat(100)));
    for helping in [false, true] {
        if helping {
            keys(&mut state, "?");
        }
        for columns in [1, 20, 59, 60, 61, 73, 74, 79, 80, 81, 109, 110, 200, 400] {
            for rows in [1, 2, 15, 16, 17, 21, 22, 23, 24, 25, 35, 36, 100] {
                screen(&state, columns, rows, true);
            }
        }
    }
}

#[test]
fn without_colours_nothing_is_lost() {
    let state = loaded(example::busy());
    let (with, without) = (screen(&state, 80, 24, true), screen(&state, 80, 24, false));
    let (with, without) = (with.backend().buffer(), without.backend().buffer());
    assert!(with.content().iter().any(|cell| cell.fg == Color::Red));
    for cell in without.content() {
        assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset));
    }
    assert_eq!(draw::plain(with), draw::plain(without));
    let text = draw::plain(without);
    for word in ["STARVED", "!!", "▶ shop/web", "even", "too few"] {
        assert!(text.contains(word), "{word}");
    }
}

#[test]
fn an_agent_that_goes_away_is_told_and_its_last_words_stay() {
    let mut state = loaded(example::busy());
    let at = |seconds: i64| Timestamp::from_unix_millis(state.now.unix_millis() + seconds * 1_000);
    let (first, second, third) = (at(1), at(2), at(3));
    state.take(first, Err("connection refused".to_owned()));
    state.take(second, Err("no such file".to_owned()));
    let text = shown(&state, 80, 24);
    // Since the first failure, with the last reason.
    assert!(
        text.contains("AGENT UNREACHABLE since 14:13:21Z, trying on: no such file"),
        "{text}"
    );
    assert!(text.contains("shop/web"), "{text}");
    state.take(third, Ok(Box::new(example::busy())));
    assert!(!shown(&state, 80, 24).contains("UNREACHABLE"));
}

#[test]
fn keys_sort_select_and_filter() {
    let mut state = loaded(example::busy());
    assert_eq!((state.sort, name(&state).as_str()), (Sort::Verdict, "shop/web"));
    state.press(key(KeyCode::Down));
    assert_eq!(name(&state), "big/sessions");
    // The selection stays with the Service while the order changes.
    keys(&mut state, "s");
    assert_eq!((state.sort, name(&state).as_str()), (Sort::Rate, "big/sessions"));
    keys(&mut state, "s");
    assert_eq!(state.sort, Sort::Name);
    let order: Vec<&str> = state
        .rows()
        .iter()
        .map(|row| row.service.diagnosis.service.as_str())
        .collect();
    assert_eq!(order, ["sessions", "quiet", "catalog", "web"]);
    keys(&mut state, "s");
    assert_eq!(state.sort, Sort::Dispersion);
    assert_eq!(state.rows()[0].service.diagnosis.service, "web");
    keys(&mut state, "s");
    assert_eq!(state.sort, Sort::Verdict);

    state.press(key(KeyCode::End));
    assert_eq!(name(&state), "default/quiet");
    state.press(key(KeyCode::Down));
    assert_eq!(name(&state), "default/quiet");
    state.press(key(KeyCode::Home));
    keys(&mut state, "k");
    assert_eq!(name(&state), "shop/web");

    // While a filter is typed, letters are letters.
    keys(&mut state, "/CATq");
    assert!(state.rows().is_empty());
    state.press(key(KeyCode::Backspace));
    state.press(key(KeyCode::Enter));
    assert_eq!(
        (state.mode, state.rows().len(), name(&state).as_str()),
        (Mode::Watching, 1, "shop/catalog")
    );
    state.press(key(KeyCode::Esc));
    assert_eq!(state.rows().len(), 4);
    // By an endpoint's address, and by the verdict.
    keys(&mut state, "/10.244.1.104");
    assert_eq!(name(&state), "big/sessions");
    state.press(key(KeyCode::Esc));
    keys(&mut state, "/starved");
    assert_eq!(state.rows().len(), 1);
}

#[test]
fn keys_quit_pause_switch_and_help() {
    let mut state = loaded(example::busy());
    keys(&mut state, "o");
    assert_eq!(state.side, Side::Open);
    keys(&mut state, "n");
    assert_eq!(state.side, Side::New);
    keys(&mut state, "?");
    assert_eq!(state.mode, Mode::Helping);
    keys(&mut state, "q");
    assert_eq!(state.mode, Mode::Watching);

    keys(&mut state, "p");
    let empty = || {
        Box::new(ReportView {
            services: vec![],
            ..example::busy()
        })
    };
    state.take(state.now, Ok(empty()));
    assert_eq!(state.rows().len(), 4);
    keys(&mut state, " ");
    state.take(state.now, Ok(empty()));
    assert!(state.rows().is_empty());

    assert_eq!(state.press(key(KeyCode::Char('q'))), Step::Quit);
    for mode in [Mode::Watching, Mode::Typing, Mode::Helping] {
        state.mode = mode;
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(state.press(control_c), Step::Quit);
    }
}

#[test]
fn a_rate_comes_from_the_last_seconds() {
    let report = |seconds: i64, connects: u64| {
        let mut report = example::busy();
        report.node.time = Timestamp::from_unix_millis(report.node.time.unix_millis() + seconds * 1_000);
        report.services.truncate(1);
        report.services[0].diagnosis.attribution.connects = connects;
        Box::new(report)
    };
    let mut state = State::new(Timestamp::default());
    let rate = |state: &State| state.rows()[0].rate;
    state.take(Timestamp::default(), Ok(report(0, 1_000)));
    // From the history: two backends of about twelve a second.
    assert!((20.0..30.0).contains(&rate(&state)), "{}", rate(&state));
    state.take(Timestamp::default(), Ok(report(2, 1_500)));
    assert!((rate(&state) - 250.0).abs() < 1e-9);
    // What is more than ten seconds old is forgotten.
    state.take(Timestamp::default(), Ok(report(12, 1_500)));
    assert!(rate(&state).abs() < 1e-9);
    // The agent started anew.
    state.take(Timestamp::default(), Ok(report(13, 10)));
    state.take(Timestamp::default(), Ok(report(14, 17)));
    assert!((rate(&state) - 7.0).abs() < 1e-9);
}

#[test]
fn alarms_count_starved_endpoints_and_uneven_services() {
    let mut report = example::busy();
    assert_eq!(loaded(report.clone()).alarms(), 1);
    report.services[1].diagnosis.verdict = VerdictKind::Uneven;
    let mut state = loaded(report);
    keys(&mut state, "/nothing");
    assert_eq!(state.alarms(), 2);
}

#[test]
fn a_name_cannot_talk_to_the_terminal() {
    let mut report = example::busy();
    let hostile = "\u{1b}[2J\u{1b}]0;x\u{7}\r\n\u{9b}31m";
    for service in &mut report.services {
        service.diagnosis.namespace = hostile.into();
        service.diagnosis.sentences = vec![hostile.into()];
    }
    report.node.node = Some(hostile.into());
    let text = shown(&loaded(report), 80, 24);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    assert_eq!(text.lines().count(), 24);
}
