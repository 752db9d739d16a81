//! Sizes of puts, as the command line names them.

use std::fmt;
use std::str::FromStr;

/// Bytes of puts, in the order in which they are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

/// The largest put: windows and what is put into them lie in memory.
const MOST: u64 = 1 << 30;

/// Sizes that are none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizesError {
    /// Not a number of bytes.
    #[error("{text:?} is no size: expected bytes, or a number with K, M or G (as in 8..4M or 4K,1M)")]
    NoSize { text: String },

    /// Nothing to put, or too much.
    #[error("a put has 1 byte to 1G, not {bytes}")]
    OutOfRange { bytes: u64 },

    /// A range in which there is no power of two.
    #[error("no power of two lies in {from}..{to}")]
    NoPower { from: u64, to: u64 },
}

impl FromStr for Sizes {
    type Err = SizesError;

    fn from_str(text: &str) -> Result<Self, SizesError> {
        let Some((from, to)) = text.split_once("..") else {
            return text.split(',').map(size).collect::<Result<_, _>>().map(Sizes);
        };
        let (from, to) = (size(from)?, size(to)?);
        let powers: Vec<u64> = (0..=MOST.ilog2()).map(|power| 1 << power).collect();
        let within: Vec<u64> = powers.into_iter().filter(|power| (from..=to).contains(power)).collect();
        if within.is_empty() { Err(SizesError::NoPower { from, to }) } else { Ok(Sizes(within)) }
    }
}

fn size(text: &str) -> Result<u64, SizesError> {
    let digits = text.trim().trim_end_matches(['K', 'k', 'M', 'm', 'G', 'g']);
    let shift = match text.trim()[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return Err(SizesError::NoSize { text: text.to_owned() }),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let bytes = bytes.ok_or_else(|| SizesError::NoSize { text: text.to_owned() })?;
    if (1..=MOST).contains(&bytes) { Ok(bytes) } else { Err(SizesError::OutOfRange { bytes }) }
}

/// A size as it is shown: `8`, `4K`, `1M`, `1000`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(30, "G"), (20, "M"), (10, "K")];
        match units.into_iter().find(|(shift, _)| self.0 > 0 && self.0.trailing_zeros() >= *shift) {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => self.0.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_every_power_of_two_in_it() {
        assert_eq!("8..64".parse(), Ok(Sizes(vec![8, 16, 32, 64])));
        assert_eq!("5..40".parse(), Ok(Sizes(vec![8, 16, 32])));
        assert_eq!("2k..8K".parse(), Ok(Sizes(vec![2048, 4096, 8192])));
        assert_eq!("8..4M".parse::<Sizes>().unwrap().0.len(), 20);
        assert_eq!("1G..1G".parse(), Ok(Sizes(vec![1 << 30])));
    }

    #[test]
    fn a_list_is_taken_as_it_is() {
        assert_eq!("1000, 8,4M".parse(), Ok(Sizes(vec![1000, 8, 4 << 20])));
    }

    #[test]
    fn what_is_no_size_is_named() {
        for text in ["", "8,", "x", "4KB", "KM", "8..", "-1", "1.5M", "K", "4KK", "8...64"] {
            let error = text.parse::<Sizes>().unwrap_err();
            assert!(matches!(error, SizesError::NoSize { .. }), "{text}: {error}");
        }
        for (text, bytes) in [("0", 0), ("0..8", 0), ("2G", 2 << 30), ("8,0", 0)] {
            assert_eq!(text.parse::<Sizes>(), Err(SizesError::OutOfRange { bytes }));
        }
        assert_eq!("9..15".parse::<Sizes>(), Err(SizesError::NoPower { from: 9, to: 15 }));
        assert_eq!("64..8".parse::<Sizes>(), Err(SizesError::NoPower { from: 64, to: 8 }));
    }

    #[test]
    fn sizes_are_shown_as_they_are_written() {
        for (bytes, text) in
            [(8, "8"), (4096, "4K"), (3 << 20, "3M"), (1000, "1000"), (1 << 30, "1G"), (0, "0")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
