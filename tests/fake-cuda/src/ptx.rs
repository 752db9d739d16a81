//! Contents of a PTX text: its version, its entries and the sizes of their parameters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::code::{Code, Result};

/// A module's entries by name, each with the bytes of its parameters.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ptx {
    /// Major and minor.
    pub version: (u32, u32),
    pub entries: BTreeMap<String, Vec<usize>>,
}

/// The newest PTX that a driver of this version compiles.
pub fn newest(driver: i32) -> (u32, u32) {
    match driver {
        ..12000 => (7, 8),
        12000..12060 => (8, (driver as u32 - 12000) / 10),
        12060..12070 => (8, 5),
        12070..12080 => (8, 6),
        12080..12090 => (8, 7),
        12090..13000 => (8, 8),
        _ => (9, (driver as u32 - 13000) / 10),
    }
}

/// Reads a module, each text once: instances of a process load the same half megabyte many times.
pub fn contents(text: &str) -> Result<Arc<Ptx>> {
    static KNOWN: Mutex<Vec<(String, Arc<Ptx>)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap();
    if let Some((_, ptx)) = known.iter().find(|(of, _)| of == text) {
        return Ok(Arc::clone(ptx));
    }
    let ptx = Arc::new(read(text)?);
    known.push((text.to_owned(), Arc::clone(&ptx)));
    Ok(ptx)
}

fn read(text: &str) -> Result<Ptx> {
    let code: String =
        text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    let after = code.split(".version").nth(1).ok_or(Code::INVALID_PTX)?;
    let number = after.split_whitespace().next().ok_or(Code::INVALID_PTX)?;
    let (major, minor) = number.split_once('.').ok_or(Code::INVALID_PTX)?;
    let part = |text: &str| text.parse().map_err(|_| Code::INVALID_PTX);
    let version = (part(major)?, part(minor)?);
    let entries = code.split(".entry").skip(1).map(entry).collect::<Result<_>>()?;
    Ok(Ptx { version, entries })
}

/// `NAME(.param .u64 a, .param .align 8 .b8 b[24])`
fn entry(text: &str) -> Result<(String, Vec<usize>)> {
    let body = text.find('{').ok_or(Code::INVALID_PTX)?;
    let head = &text[..body];
    let (name, parameters) = match head.split_once('(') {
        Some((name, rest)) => (name, rest.split_once(')').ok_or(Code::INVALID_PTX)?.0),
        None => (head, ""),
    };
    let sizes = parameters.split(',').map(str::trim).filter(|p| !p.is_empty()).map(size);
    let name = name.split_whitespace().next().ok_or(Code::INVALID_PTX)?;
    Ok((name.to_owned(), sizes.collect::<Result<_>>()?))
}

/// `.param .u64 NAME` or `.param .align 8 .b8 NAME[24]`
fn size(parameter: &str) -> Result<usize> {
    let unit =
        |word: &str| word.strip_prefix('.')?.trim_start_matches(['u', 's', 'b', 'f']).parse::<usize>().ok();
    let bits = parameter.split_whitespace().find_map(unit).ok_or(Code::INVALID_PTX)?;
    let count = match parameter.split_once('[') {
        Some((_, rest)) => rest.trim_end_matches(']').trim().parse().map_err(|_| Code::INVALID_PTX)?,
        None => 1,
    };
    Ok(bits / 8 * count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_with_the_sizes_of_their_parameters() {
        let text = "// .entry not_this\n.version 8.5\n.target sm_80\n.visible .entry one(\n\t.param .u64 one_param_0,\n\
                    \t.param .align 16 .b8 one_param_1[48],\n\t.param .f32 one_param_2\n)\n.maxntid 256, 1, 1\n{\n\tret;\n}\n\
                    .func helper(.param .b32 x)\n{\n}\n.entry two\n{\n}\n";
        let ptx = read(text).unwrap();
        assert_eq!(ptx.version, (8, 5));
        let expected = [("one".to_owned(), vec![8, 48, 4]), ("two".to_owned(), vec![])];
        assert_eq!(ptx.entries, BTreeMap::from(expected));
        assert_eq!(read("nothing of the kind"), Err(Code::INVALID_PTX));
    }

    #[test]
    fn each_driver_has_its_newest_version() {
        assert_eq!([12050, 12060, 12080, 12090, 13000].map(newest), [(8, 5), (8, 5), (8, 7), (8, 8), (9, 0)]);
    }
}
