//! Tables without borders, aligned in columns like kubectl's.

use comfy_table::{CellAlignment, Table, presets};

/// How a row should strike the eye.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Good,
    Warn,
    Bad,
}

impl Tone {
    /// Colours a line, or leaves it.
    pub(super) fn paint(self, line: &str, color: bool) -> String {
        let code = match self {
            Self::Plain => return line.to_owned(),
            Self::Good => "32",
            Self::Warn => "33",
            Self::Bad => "31",
        };
        if color {
            format!("\x1b[{code}m{line}\x1b[0m")
        } else {
            line.to_owned()
        }
    }
}

/// A header and rows of the same width.
#[derive(Debug)]
pub(super) struct Grid {
    header: Vec<&'static str>,
    rows: Vec<(Tone, Vec<String>)>,
}

impl Grid {
    /// Begins a table. A column whose title begins with `>` holds numbers and is set to the right.
    pub(super) fn new(header: &[&'static str]) -> Self {
        Self {
            header: header.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub(super) fn row(&mut self, tone: Tone, cells: impl IntoIterator<Item = String>) {
        let mut cells: Vec<String> = cells.into_iter().collect();
        for cell in &mut cells {
            // A line break would tear the row apart, an empty cell would shift what `cut` and `awk` see.
            *cell = cell.replace(['\n', '\r', '\t'], " ");
            if cell.is_empty() {
                "-".clone_into(cell);
            }
        }
        self.rows.push((tone, cells));
    }

    /// Writes the table, one line a row.
    pub(super) fn render(&self, headers: bool, color: bool) -> String {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        if headers {
            table.add_row(self.header.iter().map(|title| title.trim_start_matches('>')));
        }
        for (_, cells) in &self.rows {
            table.add_row(cells);
        }
        for (index, title) in self.header.iter().enumerate() {
            if let Some(column) = table.column_mut(index) {
                column.set_padding((0, 3));
                if title.starts_with('>') {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        let tones = headers
            .then_some(Tone::Plain)
            .into_iter()
            .chain(self.rows.iter().map(|&(tone, _)| tone));
        table
            .lines()
            .zip(tones)
            .map(|(line, tone)| tone.paint(line.trim_end(), color) + "\n")
            .collect()
    }
}

/// A share (0 to 1) as a percentage.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// A number with three decimals, or a dash.
pub(super) fn decimal(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value:.3}"))
}

/// A duration as people say it: `1h02m05s`.
pub(super) fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    let (days, hours, minutes, seconds) = (whole / 86_400, whole / 3_600 % 24, whole / 60 % 60, whole % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{seconds:02}s"),
        (0, _, _) => format!("{hours}h{minutes:02}m{seconds:02}s"),
        _ => format!("{days}d{hours:02}h{minutes:02}m"),
    }
}

/// An address and port as people write them.
pub(super) fn endpoint(addr: std::net::IpAddr, port: u16) -> String {
    std::net::SocketAddr::new(addr, port).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_end_clean() {
        let mut grid = Grid::new(&["NAME", ">COUNT", "STATE"]);
        grid.row(Tone::Plain, ["a".into(), "7".into(), "ok".into()]);
        grid.row(Tone::Bad, ["longer".into(), "1000".into(), String::new()]);
        assert_eq!(
            grid.render(true, false),
            "NAME     COUNT   STATE\na            7   ok\nlonger    1000   -\n"
        );
        assert_eq!(
            grid.render(false, true),
            "a           7   ok\n\x1b[31mlonger   1000   -\x1b[0m\n"
        );
    }

    #[test]
    fn a_line_break_in_a_cell_cannot_tear_a_row() {
        let mut grid = Grid::new(&["A", "B"]);
        grid.row(Tone::Plain, ["x\ny".into(), "z".into()]);
        assert_eq!(grid.render(false, false), "x y   z\n");
    }

    #[test]
    fn durations_are_said_as_people_say_them() {
        for (seconds, text) in [
            (0.4, "0s"),
            (65.0, "1m05s"),
            (3_725.0, "1h02m05s"),
            (90_061.0, "1d01h01m"),
            (-1.0, "0s"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
