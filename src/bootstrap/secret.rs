//! The secret that the ranks of one job share.

use std::collections::BTreeSet;
use std::env::VarError;
use std::fmt;
use std::fs::{self, File, OpenOptions, hard_link};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Access, OFlags, access};

use super::failed;
use crate::error::BootstrapError;

/// Bytes of a drawn secret.
const DRAWN: usize = 32;
/// Fewest bits of a secret from the environment: an attacker who has seen a handshake can try
/// secrets in its own time.
const LEAST_BITS: u32 = 128;
/// Fewest distinct characters of such a secret.
const LEAST_CHARACTERS: usize = 8;

/// Key of the job: every process with the key may join. It is never sent, only proved (see the
/// module `wire::auth`).
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret of these bytes. The caller answers for their strength.
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Secret(bytes.into())
    }

    /// A fresh secret of 256 random bits.
    pub fn random() -> Result<Self, BootstrapError> {
        Ok(Secret(random::<DRAWN>()?.to_vec()))
    }

    /// The secret of `SIDELANE_SECRET`, or of the file that `SIDELANE_SECRET_FILE` names. None if
    /// neither is set. 64 hexadecimal digits are read as 256 bits, other text as itself without
    /// trailing white space.
    ///
    /// # Errors
    /// [`BootstrapError::WeakSecret`] for a text of fewer than 128 bits, estimated as its length
    /// times the bits of an alphabet of the kinds of characters that it has (10 digits, 26 small
    /// letters, 26 capitals, 33 others), or with fewer than 8 distinct characters.
    /// [`BootstrapError::BadVariable`] for a file that cannot be read.
    pub fn from_vars(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, BootstrapError> {
        if let Some(text) = lookup("SIDELANE_SECRET") {
            return Secret::from_text("SIDELANE_SECRET", &text).map(Some);
        }
        let name = "SIDELANE_SECRET_FILE";
        let Some(path) = lookup(name) else { return Ok(None) };
        match fs::read_to_string(&path) {
            Ok(text) => Secret::from_text(name, &text).map(Some),
            Err(_) => {
                let expected = "a file of text that this user can read";
                Err(BootstrapError::BadVariable { name, value: path, expected })
            }
        }
    }

    /// [`Secret::from_vars`] with the environment of this process.
    ///
    /// # Errors
    /// Those of [`Secret::from_vars`]; [`BootstrapError::BadVariable`] for a value that is not
    /// UTF-8.
    pub fn from_env() -> Result<Option<Self>, BootstrapError> {
        for name in ["SIDELANE_SECRET", "SIDELANE_SECRET_FILE"] {
            if let Err(VarError::NotUnicode(_)) = std::env::var(name) {
                let (value, expected) = ("(hidden)".to_owned(), "text in UTF-8");
                return Err(BootstrapError::BadVariable { name, value, expected });
            }
        }
        Secret::from_vars(&|name| std::env::var(name).ok())
    }

    /// The secret in hexadecimal digits: what a launcher that drew a [`Secret::random`] sets
    /// `SIDELANE_SECRET` to.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The key of this user on this machine, for jobs of one machine without a secret. Only
    /// processes of this user can read it, so no process of another user can join or read a row.
    ///
    /// It lies in the first of `/run/user/UID`, `/dev/shm` and `/tmp` where this user may write. No
    /// variable chooses the folder: ranks of one job may have been started by different launchers.
    pub(super) fn of_user() -> Result<Self, BootstrapError> {
        let user = rustix::process::geteuid().as_raw();
        let folders = [format!("/run/user/{user}"), "/dev/shm".to_owned(), "/tmp".to_owned()];
        let writable = |folder: &&String| access(folder.as_str(), Access::WRITE_OK | Access::EXEC_OK).is_ok();
        let folder = folders.iter().find(writable).unwrap_or(&folders[2]);
        Secret::kept_in(Path::new(folder), user)
    }

    /// The key of a user in a folder; the first process that asks draws it.
    fn kept_in(folder: &Path, user: u32) -> Result<Self, BootstrapError> {
        let path = folder.join(format!("sidelane-{user}.key"));
        let of_others = || BootstrapError::UserKey { path: path.display().to_string(), user };
        loop {
            let opened =
                OpenOptions::new().read(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&path);
            let file = match opened {
                Ok(file) => file,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    draw_key(folder, &path)?;
                    continue;
                }
                // A link, or a file that this user may not read.
                Err(_) => return Err(of_others()),
            };
            let facts = file.metadata().map_err(|error| failed("stat of the user's key", &error))?;
            if facts.uid() != user || facts.mode() & 0o077 != 0 || facts.len() != DRAWN as u64 {
                return Err(of_others());
            }
            let mut key = [0; DRAWN];
            (&file).read_exact(&mut key).map_err(|error| failed("read of the user's key", &error))?;
            return Ok(Secret(key.to_vec()));
        }
    }

    /// The empty key of jobs that run without a secret.
    pub(super) fn none() -> Self {
        Secret(Vec::new())
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn from_text(name: &'static str, text: &str) -> Result<Self, BootstrapError> {
        let text = text.trim_end();
        let bits = strength(text);
        if bits < LEAST_BITS {
            return Err(BootstrapError::WeakSecret { name, bits, least: LEAST_BITS });
        }
        let bytes = text.as_bytes();
        Ok(Secret(from_digits(bytes).unwrap_or_else(|| bytes.to_vec())))
    }
}

/// The most bits that a text may have; none if it repeats a few characters.
fn strength(text: &str) -> u32 {
    let distinct: BTreeSet<char> = text.chars().collect();
    if distinct.len() < LEAST_CHARACTERS {
        return 0;
    }
    let has = |kind: fn(char) -> bool| text.chars().any(kind);
    let other: fn(char) -> bool = |c| !c.is_ascii_alphanumeric();
    let kinds = [
        (has(|c| c.is_ascii_digit()), 10),
        (has(|c| c.is_ascii_lowercase()), 26),
        (has(|c| c.is_ascii_uppercase()), 26),
        (has(other), 33),
    ];
    let alphabet: u32 = kinds.into_iter().filter(|(seen, _)| *seen).map(|(_, size)| size).sum();
    (text.chars().count() as f64 * f64::from(alphabet).log2()) as u32
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

/// Writes a new key to `path`, unless another process was faster. It appears there whole.
fn draw_key(folder: &Path, path: &Path) -> Result<(), BootstrapError> {
    let name = random::<8>()?.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let draft = folder.join(format!("sidelane-{name}.draft"));
    let key = random::<DRAWN>()?;
    let write = || -> io::Result<()> {
        let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        let linked = file.write_all(&key).and_then(|()| hard_link(&draft, path));
        fs::remove_file(&draft)?;
        match linked {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    };
    write().map_err(|error| failed("writing the user's key", &error))
}

/// Random bytes of the system.
pub(super) fn random<const N: usize>() -> Result<[u8; N], BootstrapError> {
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

    /// An empty folder, removed at the end.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("sidelane-secret-{}-{name}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn processes_of_a_user_find_one_key() {
        let folder = Folder::new("one");
        let user = rustix::process::geteuid().as_raw();
        let keys: Vec<_> = std::thread::scope(|scope| {
            let drawn: Vec<_> = (0..8).map(|_| scope.spawn(|| Secret::kept_in(&folder.0, user))).collect();
            drawn.into_iter().map(|key| key.join().unwrap().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0] && key.bytes().len() == DRAWN));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
    }

    #[test]
    fn key_that_others_can_read_or_replace_is_refused() {
        let folder = Folder::new("others");
        let user = rustix::process::geteuid().as_raw();
        let path = folder.0.join(format!("sidelane-{user}.key"));
        let refused = Err(BootstrapError::UserKey { path: path.display().to_string(), user });
        fs::write(&path, [7; DRAWN]).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        assert_eq!(Secret::kept_in(&folder.0, user), refused);
        fs::remove_file(&path).unwrap();
        let elsewhere = folder.0.join("elsewhere");
        fs::write(&elsewhere, [7; DRAWN]).unwrap();
        fs::set_permissions(&elsewhere, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert_eq!(Secret::kept_in(&folder.0, user), refused);
    }

    #[test]
    fn debug_output_hides_the_secret() {
        assert_eq!(format!("{:?}", Secret::from_bytes("hush")), "Secret(redacted)");
    }

    #[test]
    fn a_weak_secret_is_refused_by_name_and_none_is_none() {
        assert_eq!(Secret::from_vars(&|_| None), Ok(None));
        let name = "SIDELANE_SECRET";
        for (text, bits) in
            [(" \n", 0), ("open sesame", 64), (&"a".repeat(200), 0), ("0123456789abcdef0123456", 118)]
        {
            let seen = Secret::from_vars(&|asked| (asked == name).then(|| text.to_owned()));
            assert_eq!(seen, Err(BootstrapError::WeakSecret { name, bits, least: 128 }), "{text}");
            let few = seen.unwrap_err().to_string().contains("fewer than 8 different characters");
            assert_eq!(few, bits == 0, "{text}");
        }
        assert_eq!(LEAST_CHARACTERS, 8, "the error's text says so");
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
        let text = "correct horse battery staple";
        let seen = Secret::from_vars(&|name| (name == "SIDELANE_SECRET").then(|| format!("{text}\n")));
        assert_eq!(seen, Ok(Some(Secret::from_bytes(text))));
    }
}
