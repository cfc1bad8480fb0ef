//! The look: colours that colour-blind people tell apart, for light and for dark surroundings.
//!
//! Everything that a colour says is also said by a label, a dash pattern, a width or a sign. Colours stand in rules with
//! literal values, twice, because not every renderer of SVG knows CSS variables or media queries; one that knows neither
//! gets the light look.

use std::fmt::Write as _;

/// Colours of the lines, after Okabe and Ito, without vermillion: that is for what is starved.
pub(super) const LINES: usize = 6;
/// How the lines are dashed, so that they differ without colours too.
const DASHES: [&str; LINES] = ["none", "7 3", "2 3", "9 3 2 3", "12 4", "4 2 1 2"];

struct Palette {
    ground: &'static str,
    card: &'static str,
    ink: &'static str,
    soft: &'static str,
    faint: &'static str,
    alarm: &'static str,
    good: &'static str,
    warn: &'static str,
    lines: [&'static str; LINES],
}

const LIGHT: Palette = Palette {
    ground: "#f4f6f8",
    card: "#ffffff",
    ink: "#17202c",
    soft: "#546072",
    faint: "#dfe4ea",
    alarm: "#c24a00",
    good: "#00704f",
    warn: "#8a5a00",
    lines: ["#0072b2", "#009e73", "#b0568c", "#4aa3d8", "#6b6b6b", "#2b3f8c"],
};

const DARK: Palette = Palette {
    ground: "#10151c",
    card: "#171e27",
    ink: "#e8edf3",
    soft: "#a3afbf",
    faint: "#2c3642",
    alarm: "#ff8a3d",
    good: "#3fc79a",
    warn: "#f0b941",
    lines: ["#4ea8e0", "#2fc198", "#e08fbd", "#9ad4f5", "#b5b5b5", "#8fa3f0"],
};

/// The rules for drawings alone.
pub(super) fn drawing() -> String {
    let mut css = String::from(
        "svg text { font-family: system-ui, -apple-system, \"Segoe UI\", \"DejaVu Sans\", sans-serif; font-size: 12px; }\n\
         svg .head { font-size: 14px; font-weight: 600; }\n\
         svg .title { font-size: 20px; font-weight: 600; }\n\
         svg .body { font-size: 13px; }\n\
         svg .strong { font-weight: 600; }\n\
         svg .end { text-anchor: end; }\n\
         svg .middle { text-anchor: middle; }\n\
         svg .num { font-variant-numeric: tabular-nums; }\n\
         svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }\n\
         svg .line.other { stroke-width: 1; stroke-opacity: 0.45; }\n\
         svg .line.alarm { stroke-width: 4; }\n\
         svg .fair { fill: none; stroke-width: 1.3; stroke-dasharray: 3 3; }\n\
         svg .grid { stroke-width: 1; }\n\
         svg .axis { stroke-width: 1; }\n\
         svg .mark { stroke-width: 1.5; stroke-dasharray: 5 3; }\n\
         svg .mark.alarm { stroke-width: 2; stroke-dasharray: none; }\n\
         svg .missing { fill-opacity: 0.14; }\n\
         svg .zone { fill-opacity: 0.12; }\n\
         svg .halo { paint-order: stroke; stroke-width: 4px; stroke-linejoin: round; }\n",
    );
    for (index, dash) in DASHES.into_iter().enumerate() {
        // Writing into a String cannot fail.
        let _infallible = writeln!(css, "svg .line.l{index} {{ stroke-dasharray: {dash}; }}");
    }
    css.push_str(&drawing_colours(&LIGHT));
    let _infallible = write!(
        css,
        "@media (prefers-color-scheme: dark) {{\n{}}}\n",
        drawing_colours(&DARK)
    );
    css
}

fn drawing_colours(palette: &Palette) -> String {
    let Palette {
        card,
        ink,
        soft,
        faint,
        alarm,
        ..
    } = palette;
    let mut css = format!(
        "svg text {{ fill: {ink}; }}\n\
         svg .soft {{ fill: {soft}; }}\n\
         svg text.alarm, svg rect.alarm, svg .missing, svg .zone {{ fill: {alarm}; }}\n\
         svg .halo {{ stroke: {card}; }}\n\
         svg .ground {{ fill: {card}; }}\n\
         svg .grid {{ stroke: {faint}; }}\n\
         svg .axis {{ stroke: {soft}; }}\n\
         svg .fair, svg .mark {{ stroke: {ink}; }}\n\
         svg .line.other {{ stroke: {soft}; }}\n\
         svg .line.alarm, svg .mark.alarm {{ stroke: {alarm}; }}\n\
         svg .bar {{ fill: {}; }}\n",
        palette.lines[0]
    );
    for (index, colour) in palette.lines.into_iter().enumerate() {
        let _infallible = writeln!(
            css,
            "svg .line.l{index} {{ stroke: {colour}; }}\nsvg text.l{index} {{ fill: {colour}; }}"
        );
    }
    css
}

/// The rules for a page and the drawings in it.
pub(super) fn page() -> String {
    let mut css = String::from(
        ":root { color-scheme: light dark; }\n\
         * { box-sizing: border-box; }\n\
         body { margin: 0; padding: 24px 16px 48px; font: 15px/1.5 system-ui, -apple-system, \"Segoe UI\", \"DejaVu Sans\", sans-serif; }\n\
         main { max-width: 1240px; margin: 0 auto; }\n\
         h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; }\n\
         h2 { font-size: 20px; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }\n\
         h3 { font-size: 15px; margin: 0 0 6px; }\n\
         p { margin: 0 0 8px; }\n\
         ul { margin: 0 0 12px; padding-left: 1.2em; }\n\
         li { margin-bottom: 4px; overflow-wrap: anywhere; }\n\
         section { border: 1px solid; border-radius: 10px; padding: 20px; margin-top: 20px; }\n\
         .top { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; margin-bottom: 12px; }\n\
         .badge { border: 1.5px solid; border-radius: 999px; padding: 1px 12px; font-weight: 600; white-space: nowrap; }\n\
         .beside { display: grid; grid-template-columns: minmax(0, 2.1fr) minmax(0, 1fr); gap: 12px 24px; align-items: start; }\n\
         .three { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 16px 24px; margin-top: 16px; }\n\
         .two { display: grid; grid-template-columns: minmax(0, 1.45fr) minmax(0, 1fr); gap: 16px 24px; margin-top: 16px; align-items: start; }\n\
         .said { font-size: 16px; list-style: none; padding: 0; }\n\
         .said li:first-child { font-weight: 600; }\n\
         .scroll { overflow-x: auto; }\n\
         .wide svg { min-width: 620px; }\n\
         svg { display: block; width: 100%; height: auto; }\n\
         table { border-collapse: collapse; width: 100%; font-size: 14px; }\n\
         th { text-align: left; font-weight: 600; vertical-align: bottom; }\n\
         th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid; }\n\
         td { vertical-align: top; }\n\
         .n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }\n\
         .k { white-space: nowrap; }\n\
         .any { overflow-wrap: anywhere; }\n\
         details { margin-top: 8px; }\n\
         summary { cursor: pointer; }\n\
         footer { margin-top: 24px; font-size: 13px; }\n\
         @media (max-width: 1080px) { .two { grid-template-columns: minmax(0, 1fr); } }\n\
         @media (max-width: 900px) { .beside { grid-template-columns: minmax(0, 1fr); } section { padding: 14px; } }\n\
         @media print { body { padding: 0; } section { break-inside: avoid; } }\n",
    );
    css.push_str(&page_colours(&LIGHT));
    let _infallible = write!(
        css,
        "@media (prefers-color-scheme: dark) {{\n{}}}\n",
        page_colours(&DARK)
    );
    css.push_str(&drawing());
    css
}

fn page_colours(palette: &Palette) -> String {
    let Palette {
        ground,
        card,
        ink,
        soft,
        faint,
        alarm,
        good,
        warn,
        ..
    } = palette;
    format!(
        "body {{ background: {ground}; color: {ink}; }}\n\
         section {{ background: {card}; border-color: {faint}; }}\n\
         th, td {{ border-color: {faint}; }}\n\
         th, .soft, footer {{ color: {soft}; }}\n\
         a {{ color: {}; }}\n\
         .starved {{ color: {alarm}; }}\n\
         .uneven {{ color: {warn}; }}\n\
         .even, .fair-word {{ color: {good}; }}\n\
         .insufficient, .no_traffic {{ color: {soft}; }}\n",
        palette.lines[0]
    )
}
