//! Text on its way into XML: escaped, measured, shortened, broken into lines.

/// Escapes text for XML, in element content and in attributes of either quote.
///
/// Characters that XML 1.0 cannot hold at all (most control characters) become U+FFFD: one of them in a name would
/// otherwise make the whole document unreadable.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\t' | '\n' | '\r' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') || turns_text(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// True for the characters that turn the direction of what follows: a name could make its neighbours read backwards.
fn turns_text(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// About how wide a text is in a sans-serif font of `size` pixels: enough to keep labels apart.
pub(crate) fn text_width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.6
}

/// Shortens a text to `most` characters by leaving out its middle, where the least is lost of an address or a name.
pub(crate) fn abridge(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.to_owned();
    }
    let tail = most.saturating_sub(1) * 3 / 5;
    let head = most.saturating_sub(1) - tail;
    let begin: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(count - tail).collect();
    format!("{begin}…{end}")
}

/// Breaks a text into lines of at most `most` characters, between words where it can.
pub(crate) fn wrap(text: &str, most: usize) -> Vec<String> {
    let most = most.max(1);
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut length = 0;
    for word in text.split_whitespace() {
        let mut letters: Vec<char> = word.chars().collect();
        if length > 0 && length + 1 + letters.len() > most {
            lines.push(std::mem::take(&mut line));
            length = 0;
        }
        while letters.len() > most {
            let rest = letters.split_off(most);
            lines.push(letters.into_iter().collect());
            letters = rest;
        }
        if length > 0 {
            line.push(' ');
            length += 1;
        }
        length += letters.len();
        line.extend(letters);
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out_of_its_quotes() {
        assert_eq!(
            escape("<b a=\"x\" b='y'>&amp;\0\u{1b}[31m\n"),
            "&lt;b a=&quot;x&quot; b=&#39;y&#39;&gt;&amp;amp;\u{fffd}\u{fffd}[31m "
        );
        assert_eq!(escape("a\u{202e}b\u{ffff}"), "a\u{fffd}b\u{fffd}");
    }

    #[test]
    fn a_long_name_loses_its_middle() {
        assert_eq!(abridge("short", 10), "short");
        assert_eq!(abridge("[fd00:1:2:3:4:5:6:7]:8080", 15), "[fd00:…:7]:8080");
        assert_eq!(abridge("[fd00:1:2:3:4:5:6:7]:8080", 15).chars().count(), 15);
        assert_eq!(abridge("abc", 1), "…");
    }

    #[test]
    fn lines_are_as_long_as_allowed() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a abcdefgh b", 3), ["a", "abc", "def", "gh", "b"]);
        assert!(wrap("  ", 3).is_empty());
    }
}
