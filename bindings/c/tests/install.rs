//! The files that `install.sh` installs: their contents, and a program that is built against each.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use common::{PACKAGE, launch, libraries, soname, succeeded};

/// Folder that everything was installed to and then moved from: no file may say where it lies.
fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let (first, last) = (folder.join("installed-first"), folder.join("installed"));
        for old in [&first, &last] {
            let _ = fs::remove_dir_all(old);
        }
        run(Command::new(Path::new(PACKAGE).join("install.sh")).args([&first, &libraries()]));
        fs::rename(&first, &last).expect("a folder that can be moved");
        last
    })
}

/// Runs a tool, and returns what it prints.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    succeeded(&output, &format!("{command:?}"))
}

/// Returns whether a tool is missing, which ends a test that needs it, unless the environment
/// requires the tool.
fn lacks(tool: &str) -> bool {
    let missing = Command::new(tool).arg("--version").output().is_err();
    if missing {
        assert!(std::env::var_os("SIDELANE_NEED_CMAKE").is_none(), "{tool} is missing");
        eprintln!("skipped: no {tool} here");
    }
    missing
}

/// Builds one of the examples as users do, with the flags that they have.
fn compiled(name: &str, flags: &[String]) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let source = Path::new(PACKAGE).join("examples/ring.c");
    run(Command::new("cc").arg("-std=gnu11").arg(source).args(flags).arg("-o").arg(&program));
    program
}

/// Runs the example as ranks. A program that links a shared library in its own folder names that
/// folder.
fn adds_up(program: &Path) {
    let mut job = launch(1, 2);
    let out = run(job.env("LD_LIBRARY_PATH", prefix().join("lib")).arg(program));
    assert_eq!(out.matches("the sum is right").count(), 2, "{out}");
}

fn needed_libraries(program: &Path) -> String {
    run(Command::new("readelf").arg("-dW").arg(program))
}

#[test]
fn shared_library_has_soname_and_no_debug_information() {
    let library = prefix().join("lib/libsidelane_c.so");
    let dynamic = run(Command::new("readelf").arg("-dW").arg(&library));
    assert!(dynamic.contains(&format!("Library soname: [{}]", soname())), "{dynamic}");
    let sections = run(Command::new("readelf").arg("-SW").arg(&library));
    assert!(!sections.contains(".debug_") && !sections.contains(".symtab"), "{sections}");
    let built = fs::metadata(libraries().join("libsidelane_c.so")).expect("a library").len();
    let installed = fs::metadata(&library).expect("a library").len();
    assert!(installed < built, "{installed} of {built} bytes");
}

#[test]
fn program_builds_with_flags_of_pkg_config() {
    if lacks("pkg-config") {
        return;
    }
    let mut tool = Command::new("pkg-config");
    tool.env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig"));
    let flags = run(tool.args(["--cflags", "--libs", &format!("sidelane = {}", env!("CARGO_PKG_VERSION"))]));
    let program =
        compiled("ring-pkg-config", &flags.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    assert!(needed_libraries(&program).contains(&soname()));
    adds_up(&program);
}

#[test]
fn program_builds_with_static_library() {
    let (include, library) = (prefix().join("include"), prefix().join("lib/libsidelane_c.a"));
    let mut flags = vec![format!("-I{}", include.display()), library.display().to_string()];
    flags.extend(["-lm", "-ldl", "-lrt", "-pthread"].map(str::to_owned));
    let program = compiled("ring-static", &flags);
    assert!(!needed_libraries(&program).contains("sidelane"));
    adds_up(&program);
}

#[test]
fn cmake_project_builds_with_both_libraries() {
    if lacks("cmake") {
        return;
    }
    let source = Path::new(PACKAGE).join("tests/cmake");
    let build = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cmake");
    let _ = fs::remove_dir_all(&build);
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(source).arg("-B").arg(&build);
    configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix().display()));
    configure.arg(format!("-DVERSION={}", env!("CARGO_PKG_VERSION")));
    run(&mut configure);
    run(Command::new("cmake").arg("--build").arg(&build));
    for (program, is_shared) in [("ring-shared", true), ("ring-static", false)] {
        let program = build.join(program);
        assert_eq!(needed_libraries(&program).contains(&soname()), is_shared);
        adds_up(&program);
    }
}
