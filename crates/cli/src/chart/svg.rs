//! A writer of well-formed SVG, with the common look of all pictures: a sheet of paper, light or
//! dark as the reader prefers. The trainer of `examples/moe-lm` has this file as a module, too.

use std::fmt::{Display, Write};

/// Light unless the reader prefers dark.
const LIGHT: &str = "
text { font: 11px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.quiet { fill: #59636e; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.paper { fill: #ffffff; stroke: #d1d9e0; }
.line { stroke: #d1d9e0; stroke-width: 1; fill: none; }";
const DARK: &str = "text { fill: #e6edf3; } .quiet { fill: #9198a1; }
.paper { fill: #0d1117; stroke: #3d444d; } .line { stroke: #3d444d; }";

/// Rules of a picture of its own, and those that differ on a dark background.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    pub light: &'static str,
    pub dark: &'static str,
}

/// A picture of this size on its paper.
pub fn picture(
    (width, height): (f64, f64),
    title: &str,
    style: Style,
    inside: impl FnOnce(&mut Svg),
) -> String {
    let view = format!("0 0 {width} {height}");
    Svg::document(&[("viewBox", &view), ("width", &width), ("height", &height), ("role", &"img")], |svg| {
        svg.element("title", &[], |svg| svg.text(title));
        let Style { light, dark } = style;
        let dark = format!("@media (prefers-color-scheme: dark) {{\n{DARK}\n{dark}\n}}");
        svg.element("style", &[], |svg| svg.text(format!("{LIGHT}\n{light}\n{dark}\n")));
        let (w, h) = (width - 1.0, height - 1.0);
        let paper = ("class", &"paper" as _);
        svg.element(
            "rect",
            &[paper, ("x", &0.5), ("y", &0.5), ("width", &w), ("height", &h), ("rx", &6)],
            |_| {},
        );
        svg.label("title", 16.0, 25.0, title);
        inside(svg);
    })
}

/// Hundredths of a pixel are enough.
pub fn round(x: f64) -> f64 {
    (x * 100.0).round() / 100.0
}

/// A document, or the inside of an element.
#[derive(Debug, Default)]
pub struct Svg(String);

/// Name and value of an attribute.
pub type Attribute<'a> = (&'a str, &'a dyn Display);

impl Svg {
    /// The whole document, with its outermost element.
    pub fn document(attributes: &[Attribute<'_>], inside: impl FnOnce(&mut Svg)) -> String {
        let mut svg = Svg::default();
        let namespace: Attribute<'_> = ("xmlns", &"http://www.w3.org/2000/svg");
        svg.element("svg", &[&[namespace], attributes].concat(), inside);
        svg.0
    }

    /// An element and its contents, which may be empty.
    pub fn element(&mut self, name: &str, attributes: &[Attribute<'_>], inside: impl FnOnce(&mut Svg)) {
        let _ = write!(self.0, "<{name}");
        for (name, value) in attributes {
            let _ = write!(self.0, " {name}=\"{}\"", escape(&value.to_string()));
        }
        self.0.push('>');
        let begin = self.0.len();
        inside(self);
        if self.0.len() == begin {
            self.0.truncate(begin - 1);
            self.0.push_str("/>\n");
        } else {
            let _ = writeln!(self.0, "</{name}>");
        }
    }

    /// Words that begin, end or have their middle at x, as their class says.
    pub fn label(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let (x, y) = (round(x), round(y));
        self.element("text", &[("class", &class), ("x", &x), ("y", &y)], |svg| svg.text(text));
    }

    /// A straight line.
    pub fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(round);
        let place: [Attribute<'_>; 5] =
            [("class", &class), ("x1", &x1), ("x2", &x2), ("y1", &y1), ("y2", &y2)];
        self.element("line", &place, |_| {});
    }

    /// Characters, escaped.
    pub fn text(&mut self, text: impl Display) {
        self.0.push_str(&escape(&text.to_string()));
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The elements of a document, each as it is opened; panics unless every element is closed in
    /// order, every value is quoted, and every `&` begins an entity.
    pub fn elements(document: &str) -> Vec<String> {
        let (mut open, mut seen, mut rest) = (Vec::new(), Vec::new(), document.trim_end());
        while let Some(begin) = rest.find('<') {
            let (text, tag) = rest.split_at(begin);
            assert_characters(text);
            assert!(!open.is_empty() || seen.is_empty(), "one outermost element, and nothing beside it");
            let (tag, after) = tag[1..].split_once('>').expect("a tag ends");
            rest = after;
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "closed in order");
                continue;
            }
            let (name, attributes) = tag.trim_end_matches('/').split_once(' ').unwrap_or((tag, ""));
            assert_attributes(attributes);
            seen.push(tag.to_owned());
            if !tag.ends_with('/') {
                open.push(name.to_owned());
            }
        }
        assert!(open.is_empty() && rest.is_empty(), "all closed: {open:?} {rest:?}");
        seen
    }

    fn assert_attributes(attributes: &str) {
        let mut parts = attributes.split('"');
        while let Some(name) = parts.next().filter(|name| !name.trim().is_empty()) {
            let name = name.trim_start().strip_suffix('=').expect("a value");
            assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'), "{name}");
            assert_characters(parts.next().expect("a quoted value"));
        }
    }

    fn assert_characters(text: &str) {
        assert!(!text.contains(['<', '>']), "{text}");
        for after in text.split('&').skip(1) {
            let entity = after.split(';').next().unwrap();
            assert!(["amp", "lt", "gt", "quot"].contains(&entity), "{text}");
        }
    }

    #[test]
    fn elements_are_nested_closed_and_escaped() {
        let document = Svg::document(&[("width", &9)], |svg| {
            svg.element("g", &[("class", &"a \"b\" <c> & d")], |svg| svg.text("1 < 2 && 3 > 2"));
            svg.element("rect", &[("x", &0.5)], |_| {});
        });
        let rect = r#"rect x="0.5"/"#;
        let group = r#"g class="a &quot;b&quot; &lt;c&gt; &amp; d""#;
        assert_eq!(elements(&document)[1..], [group, rect]);
        assert!(document.contains(">1 &lt; 2 &amp;&amp; 3 &gt; 2</g>"), "{document}");
    }

    #[test]
    fn malformed_svg_is_detected() {
        for wrong in
            ["<a><b></a></b>", "<a>", "<a/><b/>", "<a b=c/>", "<a>&nbsp;</a>", "<a/>text", "<a b=\"<\"/>"]
        {
            assert!(std::panic::catch_unwind(|| elements(wrong)).is_err(), "{wrong}");
        }
    }
}
