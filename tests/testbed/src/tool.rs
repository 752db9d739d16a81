//! Programs of this machine, run to their end.

use std::process::{Command, Output};

use crate::error::{Error, Result};

/// Runs a program; returns its standard output. Failure is an error with its output.
pub fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let Output { status, stdout, stderr } =
        command.output().map_err(|source| Error::Start { program: program.clone(), source })?;
    if !status.success() {
        return Err(Error::Failed { program, status, stderr: String::from_utf8_lossy(&stderr).into_owned() });
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// The last `count` lines of a text.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_of_a_short_text_is_the_text() {
        assert_eq!(tail("a\nb", 3), "a\nb");
        assert_eq!(tail("a\nb\nc\n", 2), "b\nc");
    }

    #[test]
    fn a_failure_tells_what_the_program_said() {
        let error = output(Command::new("sh").args(["-c", "echo sorry >&2; exit 3"])).unwrap_err();
        assert!(matches!(&error, Error::Failed { stderr, status, .. }
            if stderr == "sorry\n" && status.code() == Some(3)));
    }
}
