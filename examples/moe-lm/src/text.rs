//! Where the text comes from.

use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;

use crate::error::{Error, Result};

/// "The Rust Programming Language" as one page, as toolchains bring it: by Steve Klabnik, Carol
/// Nichols and Chris Krycho, with contributions from the Rust community, licensed MIT or
/// Apache-2.0.
///
/// # Errors
/// [`Error::NoText`] if the toolchain has none.
pub fn book() -> Result<PathBuf> {
    let said = Command::new("rustc").args(["--print", "sysroot"]).output().map_err(|_| Error::NoText)?;
    let root = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
    let page = root.join("share/doc/rust/html/book/print.html");
    if page.is_file() { Ok(page) } else { Err(Error::NoText) }
}

/// The text of a file: all of it, or of a page's body without markup and scripts.
///
/// # Errors
/// [`Error::File`]; [`Error::NoBody`] for a page that has no `<main>`.
pub fn read(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(Error::file(path))?;
    match path.extension() {
        Some(extension) if extension == "html" => {
            body(&text).ok_or_else(|| Error::NoBody { path: path.to_owned() })
        }
        _ => Ok(text),
    }
}

fn body(page: &str) -> Option<String> {
    let (_, inside) = page.split_once("<main>")?;
    let (inside, _) = inside.rsplit_once("</main>")?;
    let gone = r"(?s)<!--.*?-->|<script\b.*?</script>|<style\b.*?</style>|<svg\b.*?</svg>|<[^>]*>";
    let gone = Regex::new(gone).expect("a constant that the tests try");
    Some(html_escape::decode_html_entities(&gone.replace_all(inside, "")).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_page_the_words_of_its_body_are_left() {
        let page = "<nav>no</nav><main><h1>A &lt;b&gt;</h1><script>\nno()</script> c<!-- no\n -->\n<i>d</i></main>no";
        assert_eq!(body(page).unwrap(), "A <b> c\nd");
        assert_eq!(body("<body>no</body>"), None);
    }
}
