//! The picture on a terminal: 80 columns of plain text, colour on a terminal alone. Pure.

use std::fmt::Write as _;

use super::{
    outcome::{Outcome, Reuse},
    panel::{Panel, intervals, panels, same_share},
};
use crate::draw::thousands;

/// Width of the names at the left.
const NAME: usize = 16;
/// Width of an arm's column.
const COLUMN: usize = 32;
/// Width of a full bar.
const BAR: usize = 21;

const BOLD: &str = "1";
const DIM: &str = "2";
const BLUE: &str = "34";
const GREEN: &str = "32";
const RED: &str = "31";

/// Draws an outcome.
pub(super) fn draw(outcome: &Outcome, broken: &[String], colour: bool) -> String {
    let mut page = Page {
        text: String::new(),
        colour,
    };
    page.line(&page.paint(BOLD, &format!("Evenkeel's demo on Linux {}", outcome.kernel)));
    page.line(&format!(
        "One client with {} source ports; the server closes first, so they come again.",
        outcome.source_ports
    ));
    for panel in panels(outcome) {
        page.panel(&panel);
    }
    page.reuse(&outcome.reuse);
    page.line("");
    match &outcome.reference.missing {
        None => page.line(&format!("* reference: {}.", outcome.reference.label)),
        Some(why) => page.line(&format!(
            "The reference ({}) could not be played: {why}",
            outcome.reference.kind
        )),
    }
    page.line("Dispersion is X²/(k−1): 1 is what chance alone gives, below 1 is better.");
    page.line("");
    if broken.is_empty() {
        page.line(&page.paint(GREEN, "Every promise was kept."));
    } else {
        for promise in broken {
            page.line(&page.paint(RED, &format!("Broken promise: {promise}")));
        }
    }
    page.line("");
    page.line(&page.paint(BOLD, "Where to look next"));
    for (command, what) in [
        ("sudo evenkeel demo --keep", "the same, kept running to look inside"),
        ("sudo evenkeel doctor", "what this machine has and lacks"),
        ("sudo evenkeel agent --source dir:PATH", "your own manifests"),
        ("sudo evenkeel status", "how a running agent is"),
        ("sudo evenkeel backend list", "shares and states of its backends"),
        ("sudo evenkeel reuse", "tuples used again, and how soon"),
    ] {
        page.line(&format!("  {command:<38} {what}"));
    }
    page.text
}

struct Page {
    text: String,
    colour: bool,
}

impl Page {
    fn line(&mut self, text: &str) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.text, "{}", text.trim_end());
    }

    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour && !text.trim().is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn panel(&mut self, panel: &Panel) {
        self.line("");
        self.line(&self.paint(BOLD, panel.title));
        let heads = if panel.compared {
            ["evenkeel", "reference*"]
        } else {
            ["evenkeel", ""]
        };
        let note = format!("  {}", panel.counted);
        if panel.compared {
            self.line(&self.paint(DIM, &note));
            self.line(&format!("{:NAME$}{:COLUMN$}{}", "", heads[0], heads[1]));
        } else {
            self.line(&self.paint(DIM, &note));
        }
        let most = panel
            .bars
            .iter()
            .flat_map(|bar| bar.shares)
            .flatten()
            .fold(0.0, f64::max);
        for bar in &panel.bars {
            let mark = if bar.is_new { '+' } else { ' ' };
            let name = format!("{mark} {}", bar.backend.ip());
            let [own, other] = bar.shares.map(|share| column(share, most));
            let own = self.paint(BLUE, &own);
            self.line(&format!("{name:NAME$}{own}{}", self.paint(DIM, &other)));
        }
        for fact in &panel.facts {
            let [own, other] = &fact.values;
            self.line(&format!("  {:w$}{own:COLUMN$}{other}", fact.name, w = NAME - 2));
        }
    }

    fn reuse(&mut self, reuse: &Reuse) {
        self.line("");
        self.line(&self.paint(BOLD, "Tuple reuse over all acts, counted by the agent"));
        let mut told = format!("  {} connections came on a used client tuple", thousands(reuse.total));
        if let Some(share) = same_share(reuse) {
            let _ = write!(told, "; {share:.1} % met the same backend");
        }
        self.line(&told);
        self.line(&format!(
            "  {} same backend, {} moved, {} backend gone; {} overlaps apart",
            thousands(reuse.same_backend),
            thousands(reuse.moved),
            thousands(reuse.stale_backend),
            thousands(reuse.overlap)
        ));
        let rows = intervals(reuse);
        let most = rows.iter().map(|row| row.1).max().unwrap_or(0) as f64;
        for (label, count) in rows {
            let blocks = blocks(count as f64 / most, 2 * BAR);
            self.line(&format!(
                "  {label:w$}{} {}",
                self.paint(BLUE, &blocks),
                thousands(count),
                w = NAME - 2
            ));
        }
    }
}

/// A bar with its percentage, as wide as a column.
fn column(share: Option<f64>, most: f64) -> String {
    let Some(share) = share else {
        return format!("{:COLUMN$}", "");
    };
    let text = format!("{} {:.1} %", blocks(share / most, BAR), share * 100.0);
    format!("{text:COLUMN$}")
}

/// A bar of block characters, in eighths, so that small differences show.
fn blocks(part: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if !part.is_finite() {
        return String::new();
    }
    let eighths = (part.clamp(0.0, 1.0) * width as f64 * 8.0).round() as usize;
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::outcome::{Reference, tests::example};

    #[test]
    fn the_picture_fits_eighty_columns_of_plain_text() {
        let text = draw(&example(), &[], false);
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(80), "{widest:?}\n{text}");
        assert!(!text.contains('\x1b'));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn colour_changes_nothing_but_colour() {
        let plain = draw(&example(), &["One.".to_owned()], false);
        let painted = draw(&example(), &["One.".to_owned()], true);
        let mut bare = String::new();
        let mut rest = painted.as_str();
        while let Some(at) = rest.find('\x1b') {
            bare.push_str(&rest[..at]);
            rest = rest[at..].split_once('m').expect("a whole sequence").1;
        }
        bare.push_str(rest);
        let trimmed = |text: &str| text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
        assert_eq!(trimmed(&bare), trimmed(&plain));
    }

    #[test]
    fn a_missing_reference_is_told_and_leaves_no_column() {
        let mut outcome = example();
        outcome.reference = Reference::missing("start nft (package nftables): not found".to_owned());
        let text = draw(&outcome, &[], false);
        assert!(text.contains("could not be played: start nft"));
        assert!(!text.contains("reference*"));
    }

    #[test]
    fn bars_grow_by_eighths() {
        assert_eq!(blocks(0.0, 2), "");
        assert_eq!(blocks(0.5, 2), "█");
        assert_eq!(blocks(9.0 / 16.0, 2), "█▏");
        assert_eq!(blocks(7.0, 2), "██");
        assert_eq!(blocks(f64::NAN, 2), "");
    }
}
