//! The picture as a self-contained SVG: no scripts, no fonts or images from elsewhere. Pure.

use std::fmt::Write as _;

use super::{
    outcome::Outcome,
    panel::{Panel, intervals, panels, same_share},
};
use crate::draw::{escape, thousands};

const WIDTH: f64 = 960.0;
const MARGIN: f64 = 40.0;
const NAMES: f64 = 130.0;
const GAP: f64 = 30.0;
const BAR_HEIGHT: f64 = 14.0;
const BAR_STEP: f64 = 22.0;
const FACT_STEP: f64 = 20.0;
const OWN: &str = "#1f6feb";
const NEW: &str = "#1a9c5b";
const OTHER: &str = "#9aa4b2";
const INK: &str = "#1b2330";
const SOFT: &str = "#5c6777";
const FAINT: &str = "#e4e8ee";

/// Draws an outcome.
pub(super) fn draw(outcome: &Outcome) -> String {
    let mut sheet = Sheet {
        body: String::new(),
        y: 56.0,
    };
    sheet.text(
        MARGIN,
        "title",
        "Evenkeel: even connections while backends and agent come and go",
    );
    sheet.y += 24.0;
    sheet.text(
        MARGIN,
        "soft",
        &format!(
            "Linux {}. One client with {} source ports; the server closes first, so ports are used again at once.",
            outcome.kernel, outcome.source_ports
        ),
    );
    sheet.y += 14.0;
    sheet.panels(&panels(outcome));
    sheet.reuse(outcome);
    sheet.y += 30.0;
    let reference = match &outcome.reference.missing {
        None => format!("* reference: {}.", outcome.reference.label),
        Some(why) => format!("The reference could not be played: {why}"),
    };
    sheet.text(MARGIN, "soft", &reference);
    sheet.y += 18.0;
    sheet.text(
        MARGIN,
        "soft",
        "Dashed: an equal share. Dispersion is X²/(k−1): 1 is what chance alone gives, below 1 is better. Made by: evenkeel demo --svg",
    );
    sheet.finish()
}

struct Sheet {
    body: String,
    y: f64,
}

impl Sheet {
    fn push(&mut self, markup: std::fmt::Arguments<'_>) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(self.body, "{markup}");
    }

    fn text(&mut self, x: f64, class: &str, text: &str) {
        let y = self.y;
        self.push(format_args!(
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{}</text>"#,
            escape(text)
        ));
    }

    fn bar(&mut self, x: f64, width: f64, colour: &str) {
        let y = self.y - BAR_HEIGHT + 2.0;
        self.push(format_args!(
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{BAR_HEIGHT}" rx="2" fill="{colour}"/>"#
        ));
    }

    fn rule(&mut self) {
        let (y, right) = (self.y, WIDTH - MARGIN);
        self.push(format_args!(
            r#"<line x1="{MARGIN}" y1="{y:.1}" x2="{right}" y2="{y:.1}" stroke="{FAINT}"/>"#
        ));
    }

    /// Draws panels one below the other; those without a reference stand side by side.
    fn panels(&mut self, panels: &[Panel]) {
        let half = (WIDTH - 2.0 * MARGIN - GAP) / 2.0;
        let mut rest = panels;
        while let Some((first, others)) = rest.split_first() {
            let pair = others.first().filter(|next| !first.compared && !next.compared);
            self.y += 22.0;
            self.rule();
            let top = self.y;
            self.panel(first, MARGIN);
            rest = others;
            if let Some(second) = pair {
                let bottom = self.y;
                self.y = top;
                self.panel(second, MARGIN + half + GAP);
                self.y = self.y.max(bottom);
                rest = &others[1..];
            }
        }
    }

    fn panel(&mut self, panel: &Panel, left: f64) {
        self.y += 30.0;
        self.text(left, "head", panel.title);
        self.y += 20.0;
        self.text(left, "soft", &format!("Bars: {}.", panel.counted));
        let half = (WIDTH - 2.0 * MARGIN - GAP) / 2.0;
        let column = if panel.compared {
            half - NAMES / 2.0
        } else {
            half - NAMES
        };
        let lefts = [left + NAMES, left + NAMES + column + GAP];
        if panel.compared {
            self.y += 24.0;
            self.text(lefts[0], "arm", "evenkeel");
            self.text(lefts[1], "arm", "reference*");
        }
        self.y += 4.0;
        let shares = panel.bars.iter().flat_map(|bar| bar.shares).flatten();
        let most = shares.fold(0.0, f64::max);
        // Room for the number behind the longest bar.
        let full = column - 64.0;
        let top = self.y + BAR_STEP - BAR_HEIGHT;
        for bar in &panel.bars {
            self.y += BAR_STEP;
            let mark = if bar.is_new { " (new)" } else { "" };
            self.text(left, "label", &format!("{}{mark}", bar.backend.ip()));
            let colours = [if bar.is_new { NEW } else { OWN }, OTHER];
            for ((share, left), colour) in bar.shares.into_iter().zip(lefts).zip(colours) {
                let Some(share) = share else { continue };
                let width = if most > 0.0 { share / most * full } else { 0.0 };
                self.bar(left, width, colour);
                self.text(left + width + 8.0, "number", &format!("{:.1} %", share * 100.0));
            }
        }
        let arms = if panel.compared { 2 } else { 1 };
        let fair = 1.0 / panel.bars.len() as f64;
        for left in lefts.into_iter().take(arms).filter(|_| most > 0.0) {
            let (x, bottom) = (left + fair / most * full, self.y + 5.0);
            self.push(format_args!(
                r#"<line x1="{x:.1}" y1="{top:.1}" x2="{x:.1}" y2="{bottom:.1}" stroke="{INK}" stroke-dasharray="2 2"/>"#
            ));
        }
        self.y += 8.0;
        for fact in &panel.facts {
            self.y += FACT_STEP;
            self.text(left, "soft", fact.name);
            for (value, left) in fact.values.iter().zip(lefts).filter(|(value, _)| !value.is_empty()) {
                self.text(left, "fact", value);
            }
        }
    }

    fn reuse(&mut self, outcome: &Outcome) {
        let reuse = &outcome.reuse;
        self.y += 22.0;
        self.rule();
        self.y += 30.0;
        self.text(MARGIN, "head", "Tuple reuse over all acts, counted by the agent");
        self.y += 20.0;
        let mut told = format!(
            "{} new connections on a client tuple used before",
            thousands(reuse.total)
        );
        if let Some(share) = same_share(reuse) {
            let _ = write!(
                told,
                "; {share:.1} % of those whose earlier backend was still there met it again"
            );
        }
        self.text(MARGIN, "soft", &format!("{told}."));
        self.y += 4.0;
        let rows = intervals(reuse);
        let most = rows.iter().map(|row| row.1).max().unwrap_or(0).max(1) as f64;
        let full = WIDTH - 2.0 * MARGIN - NAMES - 80.0;
        for (label, count) in rows {
            self.y += BAR_STEP;
            self.text(MARGIN, "label", &label);
            let width = count as f64 / most * full;
            self.bar(MARGIN + NAMES, width, OWN);
            self.text(MARGIN + NAMES + width + 8.0, "number", &thousands(count));
        }
    }

    fn finish(self) -> String {
        let height = self.y + 36.0;
        let body = self.body;
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0}" width="{WIDTH}" height="{height:.0}" role="img" aria-label="Evenkeel demo">
<style>
text {{ font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; fill: {INK}; }}
.title {{ font-size: 20px; font-weight: 600; }}
.head {{ font-size: 15px; font-weight: 600; }}
.arm {{ font-weight: 600; }}
.soft {{ fill: {SOFT}; }}
.label, .number, .fact {{ font-variant-numeric: tabular-nums; }}
</style>
<rect width="{WIDTH}" height="{height:.0}" fill="white"/>
{body}</svg>
"#
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::outcome::{Reference, tests::example};

    #[test]
    fn the_drawing_stands_alone() {
        let text = draw(&example());
        assert_eq!(text.matches("http").count(), 1, "only the name of the format itself");
        assert!(!text.contains("NaN") && !text.contains("inf"));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn what_others_said_is_escaped() {
        let mut outcome = example();
        outcome.reference = Reference::missing("<script> & more".to_owned());
        let text = draw(&outcome);
        assert!(text.contains("&lt;script&gt; &amp; more"));
        assert!(!text.contains("<script>"));
    }
}
