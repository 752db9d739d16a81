//! The secret that the ranks of one job share.

use std::{fmt, fs};

use crate::error::BootstrapError;

/// Key of the job: whoever knows it may join. It is never sent, only proved (see the module `wire::auth`).
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret of these bytes.
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Secret(bytes.into())
    }

    /// A fresh secret of 256 random bits.
    pub fn random() -> Result<Self, BootstrapError> {
        Ok(Secret(random::<32>()?.to_vec()))
    }

    /// The secret of `SIDELANE_SECRET`, or of the file that `SIDELANE_SECRET_FILE` names. None if neither is set.
    /// 64 hexadecimal digits are read as 256 bits, other text as itself without trailing white space.
    pub fn from_vars(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, BootstrapError> {
        if let Some(text) = lookup("SIDELANE_SECRET") {
            return Secret::from_text(&text).map(Some).ok_or(BootstrapError::BadVariable {
                name: "SIDELANE_SECRET",
                value: text,
                expected: "a secret that is not empty",
            });
        }
        let Some(path) = lookup("SIDELANE_SECRET_FILE") else { return Ok(None) };
        let text = fs::read_to_string(&path).ok();
        text.as_deref().and_then(Secret::from_text).map(Some).ok_or(BootstrapError::BadVariable {
            name: "SIDELANE_SECRET_FILE",
            value: path,
            expected: "a readable text file that is not empty",
        })
    }

    /// [`Secret::from_vars`] with the environment of this process.
    pub fn from_env() -> Result<Option<Self>, BootstrapError> {
        Secret::from_vars(&|name| std::env::var(name).ok())
    }

    /// The secret in hexadecimal digits: what a launcher that drew a [`Secret::random`] sets `SIDELANE_SECRET` to.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The empty key of jobs that run without a secret.
    pub(in crate::bootstrap) fn none() -> Self {
        Secret(Vec::new())
    }

    pub(in crate::bootstrap) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn from_text(text: &str) -> Option<Self> {
        let text = text.trim_end().as_bytes();
        if text.is_empty() {
            return None;
        }
        Some(Secret(from_digits(text).unwrap_or_else(|| text.to_vec())))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(redacted)")
    }
}

/// The bytes that 64 hexadecimal digits stand for.
fn from_digits(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |&byte: &u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let digits: Vec<u8> = text.iter().map(digit).collect::<Option<_>>()?;
    (digits.len() == 64).then(|| digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Random bytes of the system.
pub(in crate::bootstrap) fn random<const N: usize>() -> Result<[u8; N], BootstrapError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| BootstrapError::System {
        call: "getrandom",
        errno: error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()),
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_hides_the_secret() {
        assert_eq!(format!("{:?}", Secret::from_bytes("hush")), "Secret(redacted)");
    }

    #[test]
    fn an_empty_secret_is_refused_and_none_is_none() {
        assert_eq!(Secret::from_vars(&|_| None), Ok(None));
        assert!(Secret::from_vars(&|name| (name == "SIDELANE_SECRET").then(|| " \n".into())).is_err());
        assert!(
            Secret::from_vars(&|name| (name == "SIDELANE_SECRET_FILE").then(|| "/nowhere".into())).is_err()
        );
    }

    #[test]
    fn the_digits_of_a_secret_travel_through_the_environment() {
        let drawn = Secret::random().unwrap();
        assert_eq!(drawn.to_hex().len(), 64);
        assert_ne!(drawn, Secret::random().unwrap());
        let seen = Secret::from_vars(&|name| (name == "SIDELANE_SECRET").then(|| drawn.to_hex()));
        assert_eq!(seen, Ok(Some(drawn)));
        let seen = Secret::from_vars(&|name| (name == "SIDELANE_SECRET").then(|| "open sesame\n".into()));
        assert_eq!(seen, Ok(Some(Secret::from_bytes("open sesame"))));
    }
}
