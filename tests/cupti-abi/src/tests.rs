//! The comparison.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::ffi;
use crate::releases::{RELEASES, Release};

const SOURCE: &str = include_str!("../../../src/device/audit/cupti/ffi.rs");

/// A field: its name in the header, our offset, our bytes.
type Field = (&'static str, usize, usize);

/// A record: its name without the number of its version, its first supported number, our bytes,
/// fields.
type Record = (&'static str, u32, usize, Vec<Field>);

macro_rules! field {
    ($record:ident . $ours:ident, $theirs:literal, $of:ty) => {
        ($theirs, offset_of!(ffi::$record, $ours), size_of::<$of>())
    };
}

fn records() -> [Record; 3] {
    [
        (
            "CUpti_ActivityKernel",
            9,
            size_of::<ffi::Kernel>(),
            vec![
                field!(Kernel.kind, "kind", u32),
                field!(Kernel.start, "start", u64),
                field!(Kernel.end, "end", u64),
                field!(Kernel.name, "name", usize),
            ],
        ),
        (
            "CUpti_ActivityMemcpy",
            5,
            size_of::<ffi::Memcpy>(),
            vec![
                field!(Memcpy.kind, "kind", u32),
                field!(Memcpy.bytes, "bytes", u64),
                field!(Memcpy.start, "start", u64),
                field!(Memcpy.end, "end", u64),
                field!(Memcpy.channel_type, "channelType", u32),
            ],
        ),
        (
            "CUpti_ActivityMemcpyPtoP",
            4,
            size_of::<ffi::MemcpyPtoP>(),
            vec![
                field!(MemcpyPtoP.kind, "kind", u32),
                field!(MemcpyPtoP.bytes, "bytes", u64),
                field!(MemcpyPtoP.start, "start", u64),
                field!(MemcpyPtoP.end, "end", u64),
                field!(MemcpyPtoP.channel_type, "channelType", u32),
            ],
        ),
    ]
}

const NUMBERS: [(&str, u32); 8] = [
    ("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL", ffi::CONCURRENT_KERNEL),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", ffi::MEMCPY),
    ("CUPTI_ACTIVITY_KIND_MEMCPY2", ffi::MEMCPY2),
    ("CUPTI_SUCCESS", ffi::SUCCESS),
    ("CUPTI_ERROR_MAX_LIMIT_REACHED", ffi::MAX_LIMIT_REACHED),
    ("CUPTI_ACTIVITY_FLAG_FLUSH_FORCED", ffi::FLUSH_FORCED),
    ("CUPTI_CHANNEL_TYPE_COMPUTE", ffi::CHANNEL_COMPUTE),
    ("CUPTI_CHANNEL_TYPE_ASYNC_MEMCPY", ffi::CHANNEL_ASYNC_MEMCPY),
];

/// Functions, and their C parameters according to our types. Enums of the header are passed as
/// numbers of four bytes.
const FUNCTIONS: [(&str, &str); 8] = [
    ("cuptiGetVersion", "uint32_t *"),
    ("cuptiGetResultString", "CUptiResult, const char **"),
    (
        "cuptiActivityRegisterCallbacks",
        "void (*)(uint8_t **, size_t *, size_t *), void (*)(CUcontext, uint32_t, uint8_t *, size_t, size_t)",
    ),
    ("cuptiActivityEnable", "CUpti_ActivityKind"),
    ("cuptiActivityDisable", "CUpti_ActivityKind"),
    ("cuptiActivityFlushAll", "uint32_t"),
    ("cuptiActivityGetNumDroppedRecords", "CUcontext, uint32_t, size_t *"),
    ("cuptiActivityGetNextRecord", "uint8_t *, size_t, CUpti_Activity **"),
];

/// Numbers of the versions of a record that a header has, from `first` on.
fn versions(header: &str, record: &str, first: u32) -> BTreeSet<u32> {
    let number = |line: &str| line.strip_prefix("} ")?.strip_prefix(record)?.strip_suffix(';')?.parse().ok();
    header.lines().filter_map(number).filter(|&number| number >= first).collect()
}

#[test]
fn every_version_of_a_record_begins_as_it_is_read() {
    for Release { version, include, .. } in RELEASES.iter() {
        let header = fs::read_to_string(include.join("cupti_activity.h")).unwrap();
        let mut text =
            "#include <stddef.h>\n#include <cupti_activity.h>\n#include <cupti_version.h>\n".to_owned();
        let mut assert = |what: String| writeln!(text, "_Static_assert({what}, \"{what}\");").unwrap();
        for (record, first, bytes, fields) in records() {
            let numbers = versions(&header, record, first);
            assert!(!numbers.is_empty(), "{version} has no {record}{first} or later");
            for number in numbers {
                let of = format!("{record}{number}");
                assert(format!("sizeof({of}) >= {bytes}"));
                for (field, offset, bytes) in &fields {
                    assert(format!("offsetof({of}, {field}) == {offset}"));
                    assert(format!("sizeof((({of} *)0)->{field}) == {bytes}"));
                }
            }
        }
        for (name, number) in NUMBERS {
            assert(format!("{name} == {number}"));
        }
        for (name, parameters) in FUNCTIONS {
            assert(format!("__builtin_types_compatible_p(__typeof__({name}), CUptiResult({parameters}))"));
        }
        assert("sizeof(CUptiResult) == 4 && sizeof(CUpti_ActivityKind) == 4".to_owned());
        assert("ACTIVITY_RECORD_ALIGNMENT == 8".to_owned());
        assert(format!("CUPTI_API_VERSION >= {}", ffi::OLDEST));
        compile(include, &text, version);
    }
}

/// The oldest version that the library takes is one that was compared.
#[test]
fn the_oldest_version_is_compared_too() {
    let oldest = &RELEASES[0];
    let text = format!(
        "#include <cupti_version.h>\n_Static_assert(CUPTI_API_VERSION == {}, \"oldest\");\n",
        ffi::OLDEST
    );
    compile(&oldest.include, &text, oldest.version);
}

fn compile(include: &Path, text: &str, version: &str) {
    let stubs = Path::new(env!("CARGO_MANIFEST_DIR")).join("headers");
    let compiler = ["-std=gnu11", "-fsyntax-only", "-x", "c", "-"];
    let mut cc = Command::new("cc");
    cc.arg("-isystem").arg(include).arg("-isystem").arg(stubs).args(compiler).stdin(Stdio::piped());
    let mut cc = cc.spawn().unwrap();
    cc.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(cc.wait().unwrap().success(), "CUPTI of {version}");
}

#[test]
fn every_library_has_every_function() {
    for Release { version, library, .. } in RELEASES.iter() {
        // SAFETY: CUPTI's initialisers may run at any time.
        let loaded = unsafe { libloading::Library::new(library) }.unwrap();
        let loaded = std::mem::ManuallyDrop::new(loaded);
        // SAFETY: the types were compared above; nothing is called.
        let missing = unsafe { ffi::Functions::from(&loaded) }.err();
        assert_eq!(missing, None, "CUPTI of {version}");
    }
}

/// All declarations of the source are compared: functions, numbers, and used fields.
#[test]
fn nothing_is_left_out() {
    let (declarations, functions) = SOURCE.split_once("\nfunctions! {").unwrap();
    let name = |line: &str| Some(line.trim().split_once('(')?.0.to_owned());
    let declared: Vec<String> = functions.lines().filter_map(name).collect();
    assert_eq!(declared, FUNCTIONS.map(|(name, _)| name.to_owned()));
    let constants = declarations.matches("\npub const ").count();
    assert_eq!(constants, NUMBERS.len() + 1, "numbers, and the oldest version");
    let fields = declarations.matches("\n    pub ").count();
    assert_eq!(fields, records().iter().map(|(.., fields)| fields.len()).sum::<usize>());
}
