//! The secret that the ranks of one job share.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::{fmt, fs::hard_link};

use rustix::fs::{Access, OFlags, access};

use crate::bootstrap::os::failed;
use crate::error::BootstrapError;

/// Bytes of a drawn secret.
const DRAWN: usize = 32;

/// Key of the job: every process with the key may join. It is never sent, only proved (see the
/// module `wire::auth`).
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// A secret of these bytes.
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
    pub(in crate::bootstrap) fn of_user() -> Result<Self, BootstrapError> {
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
