//! A drawing under way, and a frame with axes in which things over time are drawn.
//!
//! Where things stand is decided here; what they mean is `pictures`'. The invariant: labels of one kind do not overlap,
//! and no text reaches the markup unescaped.

use std::fmt::Write as _;

use crate::{
    draw::{Scale, clock, escape, text_width, time_ticks},
    view::Timestamp,
};

/// The size of ordinary text.
pub(super) const TEXT: f64 = 12.0;
/// The distance between two lines of labels.
const LEADING: f64 = 15.0;

/// A drawing of a fixed size.
#[derive(Debug)]
pub(super) struct Sheet {
    /// Its width.
    pub(super) width: f64,
    /// Its height.
    pub(super) height: f64,
    title: String,
    body: String,
}

impl Sheet {
    /// An empty drawing; the title is for those who cannot see it.
    pub(super) fn new(width: f64, height: f64, title: &str) -> Self {
        Self {
            width,
            height,
            title: title.to_owned(),
            body: String::new(),
        }
    }

    /// Adds markup.
    pub(super) fn push(&mut self, markup: std::fmt::Arguments<'_>) {
        // Writing into a String cannot fail.
        let _infallible = writeln!(self.body, "{markup}");
    }

    /// Adds a line of text.
    pub(super) fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        self.push(format_args!(
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}">{}</text>"#,
            escape(text)
        ));
    }

    /// Adds a straight line.
    pub(super) fn stroke(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        self.push(format_args!(
            r#"<line class="{class}" x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}"/>"#,
            from.0, from.1, to.0, to.1
        ));
    }

    /// Adds a line through points, broken where there is none, with a title of its own.
    pub(super) fn curve(&mut self, class: &str, runs: &[Vec<(f64, f64)>], title: &str) {
        let mut path = String::new();
        for run in runs {
            for (index, (x, y)) in run.iter().enumerate() {
                let letter = if index == 0 { 'M' } else { 'L' };
                let _infallible = write!(path, "{letter}{x:.1} {y:.1}");
            }
        }
        if !path.is_empty() {
            self.push(format_args!(
                r#"<path class="{class}" d="{path}"><title>{}</title></path>"#,
                escape(title)
            ));
        }
    }

    /// The drawing as a part of a page: as wide as its place.
    pub(super) fn inline(&self) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\">\n<title>{}</title>\n{}</svg>\n",
            self.width,
            self.height,
            escape(&self.title),
            self.body
        )
    }

    /// The drawing as a part of a larger one.
    pub(super) fn nested(&self, x: f64, y: f64) -> String {
        format!(
            "<svg x=\"{x}\" y=\"{y}\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\">\n<title>{2}</title>\n{3}</svg>",
            self.width,
            self.height,
            escape(&self.title),
            self.body
        )
    }

    /// The drawing as a file of its own, with its style.
    pub(super) fn alone(&self, style: &str) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\">\n\
             <title>{2}</title>\n<style>\n{style}</style>\n<rect class=\"ground\" width=\"{0}\" height=\"{1}\"/>\n{3}</svg>\n",
            self.width,
            self.height,
            escape(&self.title),
            self.body
        )
    }
}

/// A moment that the frame marks.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    /// When.
    pub(super) time: Timestamp,
    /// What happened.
    pub(super) text: String,
    /// Whether it matters most.
    pub(super) alarm: bool,
}

/// The place inside a sheet where values over time are drawn.
#[derive(Debug)]
pub(super) struct Frame {
    /// The left edge.
    pub(super) left: f64,
    /// The right edge.
    pub(super) right: f64,
    /// The upper edge.
    pub(super) top: f64,
    /// The lower edge.
    pub(super) bottom: f64,
    begin: Timestamp,
    end: Timestamp,
}

impl Frame {
    /// A frame between the times.
    pub(super) fn new(edges: (f64, f64, f64, f64), begin: Timestamp, end: Timestamp) -> Self {
        let (left, right, top, bottom) = edges;
        Self {
            left,
            right,
            top,
            bottom,
            begin,
            end,
        }
    }

    /// Where a time is; times beyond the ends are at the ends.
    pub(super) fn x(&self, time: Timestamp) -> f64 {
        let span = self.end.since(self.begin).as_secs_f64();
        Scale::linear((0.0, span), (self.left, self.right)).at(time.since(self.begin).as_secs_f64())
    }

    /// True for a time between the ends.
    pub(super) fn holds(&self, time: Timestamp) -> bool {
        (self.begin..=self.end).contains(&time)
    }

    /// Draws the grid with its labels.
    pub(super) fn axes(&self, sheet: &mut Sheet, y: &Scale, ticks: usize, label: impl Fn(f64) -> String) {
        for value in y.ticks(ticks) {
            let at = y.at(value);
            sheet.stroke("grid", (self.left, at), (self.right, at));
            sheet.text(self.left - 6.0, at + 4.0, "soft num end", &label(value));
        }
        sheet.stroke("axis", (self.left, self.bottom), (self.right, self.bottom));
        let wanted = ((self.right - self.left) / 90.0).max(2.0) as usize;
        for time in time_ticks(self.begin, self.end, wanted) {
            let x = self.x(time);
            sheet.stroke("axis", (x, self.bottom), (x, self.bottom + 4.0));
            sheet.text(x, self.bottom + 17.0, "soft num middle", &clock(time));
        }
    }

    /// Where the values of steps are: in the steps' middles, drawn on to the edges of what is known.
    pub(super) fn runs(
        &self,
        times: &[Timestamp],
        values: &[Option<f64>],
        life: (Option<Timestamp>, Option<Timestamp>),
        y: &Scale,
    ) -> Vec<Vec<(f64, f64)>> {
        let lower = life.0.map_or(self.left, |born| self.x(born));
        let upper = life.1.map_or(self.right, |gone| self.x(gone));
        let mut runs: Vec<Vec<(f64, f64)>> = Vec::new();
        let mut open = false;
        let mut before = self.left;
        for (time, value) in times.iter().zip(values) {
            let after = self.x(*time);
            let (from, to) = (before.max(lower).min(after), after.min(upper).max(before));
            before = after;
            let Some(value) = value else {
                open = false;
                continue;
            };
            let at = y.at(*value);
            if !open {
                runs.push(vec![(from, at)]);
                open = true;
            }
            if let Some(run) = runs.last_mut() {
                // The edge of the step before is not the end any more.
                if run.len() > 2 {
                    run.pop();
                }
                run.push((f64::midpoint(from, to), at));
                run.push((to, at));
            }
        }
        runs
    }

    /// Values that stay until something changes, as steps: each change where one of the moments says, else between two steps.
    pub(super) fn stairs(
        &self,
        times: &[Timestamp],
        values: &[Option<f64>],
        moments: &[Timestamp],
        y: &Scale,
    ) -> Vec<Vec<(f64, f64)>> {
        let mut runs: Vec<Vec<(f64, f64)>> = Vec::new();
        let mut before = self.begin;
        let mut last: Option<f64> = None;
        for (time, value) in times.iter().zip(values) {
            let from = self.x(before);
            let to = self.x(*time);
            let moment = moments.iter().find(|moment| (before..=*time).contains(moment));
            before = *time;
            let Some(value) = value else {
                last = None;
                continue;
            };
            let at = y.at(*value);
            match (last, runs.last_mut()) {
                (Some(old), Some(run)) => {
                    let turn = moment.map_or(from, |moment| self.x(*moment));
                    run.extend([(turn, old), (turn, at), (to, at)]);
                }
                _ => runs.push(vec![(from, at), (to, at)]),
            }
            last = Some(at);
        }
        runs
    }

    /// Draws marks with their labels above the frame, each label on the lowest line where it has room.
    pub(super) fn marks(&self, sheet: &mut Sheet, marks: &[Mark], lines: usize) {
        let mut taken: Vec<Vec<(f64, f64)>> = vec![Vec::new(); lines];
        for mark in marks.iter().filter(|mark| self.holds(mark.time)) {
            let x = self.x(mark.time);
            let width = text_width(&mark.text, TEXT) + 10.0;
            let right_of = x + width <= sheet.width || x < width;
            let span = if right_of { (x, x + width) } else { (x - width, x) };
            let free = taken
                .iter()
                .position(|line| line.iter().all(|other| span.1 <= other.0 || span.0 >= other.1));
            let class = if mark.alarm { "mark alarm" } else { "mark" };
            let top = free.map_or(self.top, |line| self.top - 4.0 - line as f64 * LEADING - 11.0);
            sheet.stroke(class, (x, top), (x, self.bottom));
            if let Some(line) = free {
                taken[line].push(span);
                let class = match (mark.alarm, right_of) {
                    (true, true) => "alarm strong",
                    (true, false) => "alarm strong end",
                    (false, true) => "",
                    (false, false) => "end",
                };
                let at = if right_of { x + 5.0 } else { x - 5.0 };
                sheet.text(at, self.top - 6.0 - line as f64 * LEADING, class, &mark.text);
            }
        }
    }

    /// Writes labels right of the frame, each as near to its place as the others allow.
    pub(super) fn labels(&self, sheet: &mut Sheet, mut labels: Vec<(f64, String, String)>) {
        labels.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut places: Vec<f64> = Vec::new();
        for (wanted, _, _) in &labels {
            let least = places.last().map_or(self.top, |last| last + LEADING);
            places.push(wanted.max(least));
        }
        let mut most = self.bottom + 2.0;
        for place in places.iter_mut().rev() {
            *place = place.min(most);
            most = *place - LEADING;
        }
        for ((wanted, class, text), place) in labels.into_iter().zip(places) {
            sheet.stroke("grid", (self.right + 2.0, wanted), (self.right + 9.0, place));
            sheet.text(self.right + 11.0, place + 4.0, &class, &text);
        }
    }
}
