use roxmltree::{Document as Xml, ParsingOptions};

use super::{
    example::{self, Plan},
    series::Series,
    *,
};
use crate::view::IntervalView;

fn parse(text: &str) -> Xml<'_> {
    let options = ParsingOptions {
        allow_dtd: true,
        ..ParsingOptions::default()
    };
    Xml::parse_with_options(text, options).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Page and drawing of a report, after what must hold for every one of them.
fn drawn(report: &ReportView) -> (String, String) {
    let (page, picture) = (page(report), picture(report));
    for text in [&page, &picture] {
        let xml = parse(text);
        for node in xml.descendants().filter(roxmltree::Node::is_element) {
            let name = node.tag_name().name();
            assert!(
                !["script", "img", "image", "iframe", "object", "use", "foreignObject"].contains(&name),
                "{name}"
            );
            for attribute in node.attributes() {
                let (name, value) = (attribute.name(), attribute.value());
                assert!(!name.starts_with("on"), "{name}");
                assert!(!value.contains("NaN") && !value.contains("inf"), "{name}={value}");
                if name == "href" || name == "src" {
                    assert!(value.starts_with('#') || value == "data:,", "{name}={value}");
                }
            }
        }
        let elsewhere = text
            .replace("xmlns=\"http://www.w3.org/1999/xhtml\"", "")
            .replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        assert!(!elsewhere.contains("http://") && !elsewhere.contains("https://") && !elsewhere.contains("url("));
    }
    (page, picture)
}

fn one(plan: &Plan<'_>) -> ReportView {
    ReportView {
        services: vec![example::service(plan)],
        ..example::fixture()
    }
}

const WEB: Plan<'static> = Plan {
    name: ("shop", "web"),
    verdict: VerdictKind::Starved,
    backends: 3,
    young: 1,
    starved: true,
    rate: 12,
};

/// All text of a document, an element a line.
fn texts(text: &str) -> Vec<String> {
    parse(text)
        .descendants()
        .filter(|node| node.is_element() && node.tag_name().name() != "style")
        .filter_map(|node| Some(node.text()?.trim().to_owned()))
        .filter(|text| !text.is_empty())
        .collect()
}

#[test]
fn the_founding_story_is_one_picture() {
    let (page, picture) = drawn(&example::fixture());
    insta::assert_snapshot!("page", page.replace(env!("CARGO_PKG_VERSION"), "VERSION"));
    insta::assert_snapshot!("picture", picture);
}

#[test]
fn a_starved_endpoint_strikes_the_eye() {
    let (page, picture) = drawn(&one(&WEB));
    for text in [page, picture] {
        let xml = parse(&text);
        let classed = |class: &str| {
            xml.descendants()
                .filter(|node| node.attribute("class").is_some_and(|found| found == class))
                .count()
        };
        // The line in the pictures of new and of open connections, its birth in all three over time, the shade in one.
        assert_eq!(
            (classed("line alarm"), classed("mark alarm"), classed("missing")),
            (2, 3, 1)
        );
        let said = texts(&text);
        for wanted in [
            "10.244.1.7:8080 added 14:11:40",
            "STARVED",
            "cause: port_reuse",
            "1 = chance",
            "60 s: TIME_WAIT of sockets ends",
            "120 s: IPVS and conntrack forget",
            "0 %  10.244.1.7:8080",
        ] {
            assert!(said.iter().any(|text| text == wanted), "`{wanted}` is not in {said:#?}");
        }
    }
}

#[test]
fn a_starved_line_runs_along_zero_from_its_birth() {
    let report = one(&WEB);
    let series = Series::new(&report, &report.services[0]);
    let line = &series.lines[0];
    assert!(line.starved.is_some() && line.look == series::Look::Starved);
    let born = line.born.expect("its birth was seen");
    for (time, share) in series.times.iter().zip(&line.share) {
        assert_eq!(*share, (*time > born).then_some(0.0), "{time}");
    }
    let last = line.fair.last().copied().flatten().expect("it is there");
    assert!((last - 1.0 / 3.0).abs() < 1e-9);
    assert!((series.lines[1].fair[0].expect("it is there") - 0.5).abs() < 1e-9);
}

#[test]
fn a_new_endpoint_that_gets_its_share_has_no_dip_at_its_birth() {
    let report = one(&Plan {
        verdict: VerdictKind::Even,
        starved: false,
        backends: 4,
        rate: 40,
        ..WEB
    });
    let series = Series::new(&report, &report.services[0]);
    let young = series
        .lines
        .iter()
        .find(|line| line.born.is_some())
        .expect("one is young");
    let shares: Vec<f64> = young.share.iter().flatten().copied().collect();
    assert!(
        !shares.is_empty() && shares.iter().all(|share| *share > 0.15),
        "{shares:?}"
    );
}

#[test]
fn weights_move_what_is_fair() {
    let mut report = one(&WEB);
    for (endpoint, weight) in report.services[0].diagnosis.endpoints.iter_mut().zip([1, 3, 4]) {
        endpoint.weight = weight;
    }
    let series = Series::new(&report, &report.services[0]);
    assert!(!series.equal_weights);
    let fair: Vec<f64> = series.lines.iter().filter_map(|line| *line.fair.last()?).collect();
    assert_eq!(fair, [0.5, 0.125, 0.375]);
    drawn(&report);
}

#[test]
fn an_empty_report_says_so() {
    let (page, picture) = drawn(&ReportView {
        services: vec![],
        ..example::fixture()
    });
    assert!(
        texts(&page)
            .iter()
            .any(|text| text == "No Service had traffic on this node")
    );
    assert!(
        texts(&picture)
            .iter()
            .any(|text| text == "No Service had traffic on this node.")
    );
}

#[test]
fn a_service_without_history_is_drawn_without_lines() {
    let mut report = one(&WEB);
    report.services[0].points.clear();
    report.services[0].intervals.clear();
    report.services[0].diagnosis.endpoints.clear();
    let (page, _) = drawn(&report);
    let said = texts(&page);
    for wanted in [
        "No connection to a known endpoint in this time.",
        "No source port was used again.",
        "Too few connections to tell it from chance.",
    ] {
        assert!(said.iter().any(|text| text == wanted), "{wanted}");
    }
}

#[test]
fn one_backend_is_all_of_it() {
    let (_, picture) = drawn(&one(&Plan {
        verdict: VerdictKind::Even,
        backends: 1,
        young: 0,
        starved: false,
        ..WEB
    }));
    assert!(texts(&picture).iter().any(|text| text == "100 %  10.244.1.5:8080"));
}

#[test]
fn a_hundred_backends_get_few_labels() {
    for young in [0, 1, 20, 100] {
        let report = one(&Plan {
            backends: 100,
            young,
            starved: young > 0,
            verdict: if young > 0 {
                VerdictKind::Starved
            } else {
                VerdictKind::Even
            },
            ..WEB
        });
        let (page, picture) = drawn(&report);
        let labels = texts(&picture).iter().filter(|text| text.contains(":8080")).count();
        // Titles of lines are no labels; each line has one, in two pictures.
        let titles = parse(&picture)
            .descendants()
            .filter(|node| node.tag_name().name() == "title" && node.text().is_some_and(|text| text.contains(":8080")))
            .count();
        assert!(labels - titles <= 2 * series::NAMED + 2, "{young}: {labels} - {titles}");
        if young <= 1 {
            let others = texts(&picture).iter().filter(|text| text.contains(" others, ")).count();
            assert_eq!(others, 2, "{young}");
        }
        assert!(texts(&page).iter().any(|text| text == "88 more"));
    }
}

#[test]
fn names_cannot_inject() {
    let hostile = "</text></svg><script>alert(1)</script>\"'&]]>\u{0}\u{1b}[31m\u{202e}";
    let mut report = example::busy();
    report.node.node = Some(hostile.into());
    report.node.kernel = hostile.into();
    report.node.proxy = Some(hostile.into());
    report.node.proxy_trace = Some(hostile.into());
    for setting in &mut report.node.settings {
        setting.name = hostile.into();
        setting.value = Some(hostile.into());
        setting.advice = Some(hostile.into());
    }
    for service in &mut report.services {
        let diagnosis = &mut service.diagnosis;
        diagnosis.namespace = hostile.into();
        diagnosis.service = hostile.repeat(20);
        diagnosis.set = hostile.into();
        diagnosis.sentences = vec![hostile.into(); 3];
        diagnosis.advice = vec![hostile.into()];
        diagnosis.failed.insert(hostile.into(), 1);
        for starved in &mut diagnosis.starved {
            starved.cause = hostile.into();
        }
        for endpoint in &mut diagnosis.endpoints {
            endpoint.status = hostile.into();
            endpoint.excluded = Some(hostile.into());
        }
        if let Some(ports) = &mut diagnosis.ports {
            ports.destination = hostile.into();
        }
    }
    let (page, picture) = drawn(&report);
    for text in [page, picture] {
        assert!(!text.contains("<script") && !text.contains('\u{1b}') && !text.contains('\u{202e}'));
        assert!(text.contains("&lt;script&gt;"));
    }
}

#[test]
fn points_shorter_than_the_list_of_backends_are_survived() {
    let mut report = one(&WEB);
    for point in &mut report.services[0].points {
        point.started.truncate(1);
        point.open.clear();
        point.dispersion = Some(f64::INFINITY);
    }
    report.step_seconds = -1.0;
    report.services[0].intervals = vec![IntervalView {
        up_to_seconds: None,
        count: u64::MAX / 2,
    }];
    drawn(&report);
}

#[test]
fn the_worst_service_is_the_picture() {
    let mut report = example::busy();
    report.services.reverse();
    let (page, picture) = drawn(&report);
    assert!(picture.contains("<title>shop/web: ✖ starved</title>"));
    let order: Vec<usize> = ["shop/web", "shop/catalog", "default/quiet"]
        .iter()
        .map(|name| page.find(&format!("<h2>{name}</h2>")).expect("a section"))
        .collect();
    assert!(order.is_sorted(), "{order:?}");
}

#[test]
fn a_starved_endpoint_outside_the_history_has_its_line_all_the_same() {
    let mut report = one(&WEB);
    let service = &mut report.services[0];
    service.backends.pop();
    for point in &mut service.points {
        point.started.pop();
        point.open.pop();
    }
    let series = Series::new(&report, &report.services[0]);
    assert_eq!(
        (series.lines.len(), series.lines[0].name.as_str()),
        (3, "10.244.1.7:8080")
    );
    assert_eq!(series.lines[0].share.last(), Some(&Some(0.0)));
    drawn(&report);
}

#[test]
fn services_without_traffic_are_counted_only() {
    let mut report = example::busy();
    for service in &mut report.services[1..] {
        service.diagnosis.verdict = VerdictKind::NoTraffic;
    }
    let (page, _) = drawn(&report);
    assert_eq!(page.matches("<section id=").count(), 1);
    assert!(texts(&page).iter().any(|text| text == "3 Services without traffic."));
}
