//! Cells and tones.

use ratatui::{
    buffer::Buffer,
    layout::Rect,
    style::{Color, Modifier, Style},
};

/// Whether there are colours.
#[derive(Clone, Copy, Debug)]
pub(in crate::cli::top) struct Paint {
    /// False with NO_COLOR: then bold and reversed cells are all there is.
    pub(in crate::cli::top) color: bool,
}

/// How a text should strike the eye.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    /// As it comes.
    Plain,
    /// More than that.
    Strong,
    /// A title.
    Head,
    /// The lines at the top and the foot.
    Bar,
    /// The selected row.
    Chosen,
    /// All is well.
    Good,
    /// Look here.
    Warn,
    /// Look here first.
    Alarm,
    /// A bar of a chart.
    Fill,
}

impl Paint {
    fn style(self, tone: Tone) -> Style {
        let style = match tone {
            Tone::Plain | Tone::Good | Tone::Fill => Style::new(),
            Tone::Strong | Tone::Head | Tone::Warn | Tone::Alarm => Style::new().add_modifier(Modifier::BOLD),
            Tone::Bar | Tone::Chosen => Style::new().add_modifier(Modifier::REVERSED),
        };
        let colour = match tone {
            Tone::Good => Some(Color::Green),
            Tone::Warn => Some(Color::Yellow),
            Tone::Alarm => Some(Color::Red),
            Tone::Fill => Some(Color::Blue),
            Tone::Head => Some(Color::Cyan),
            _ => None,
        };
        colour.filter(|_| self.color).map_or(style, |colour| style.fg(colour))
    }
}

/// A part of a screen to write on.
#[derive(Debug)]
pub(super) struct Canvas<'b> {
    buffer: &'b mut Buffer,
    area: Rect,
    paint: Paint,
}

impl<'b> Canvas<'b> {
    /// Takes the part of the screen, clean.
    pub(super) fn new(buffer: &'b mut Buffer, area: Rect, paint: Paint) -> Self {
        let area = area.intersection(buffer.area);
        for position in area.positions() {
            if let Some(cell) = buffer.cell_mut(position) {
                cell.reset();
            }
        }
        Self { buffer, area, paint }
    }

    /// Its columns.
    pub(super) fn width(&self) -> u16 {
        self.area.width
    }

    /// Its rows.
    pub(super) fn height(&self) -> u16 {
        self.area.height
    }

    /// Writes a text of at most `width` cells; what does not fit on the screen is left out.
    pub(super) fn put(&mut self, x: u16, y: u16, width: u16, text: &str, tone: Tone) {
        if x >= self.area.width || y >= self.area.height {
            return;
        }
        let width = width.min(self.area.width - x);
        let style = self.paint.style(tone);
        // Characters that would move the cursor or talk to the terminal are left out by the buffer.
        self.buffer
            .set_stringn(self.area.x + x, self.area.y + y, text, usize::from(width), style);
    }

    /// Writes a text so that it ends with the place.
    pub(super) fn put_right(&mut self, x: u16, y: u16, width: u16, text: &str, tone: Tone) {
        let text = cut(text, usize::from(width));
        let blank = width.saturating_sub(text.chars().count() as u16);
        self.put(x + blank, y, width - blank, &text, tone);
    }

    /// Gives a whole row a tone.
    pub(super) fn fill(&mut self, y: u16, tone: Tone) {
        let blank = " ".repeat(usize::from(self.area.width));
        self.put(0, y, self.area.width, &blank, tone);
    }
}

/// Cuts a text to `most` characters, with a sign that something is left out.
pub(super) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(most.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

/// A screen as lines of text, without the blanks at their ends.
pub(in crate::cli::top) fn plain(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in buffer.area.top()..buffer.area.bottom() {
        let line: String = (buffer.area.left()..buffer.area.right())
            .filter_map(|x| Some(buffer.cell((x, y))?.symbol()))
            .collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}
