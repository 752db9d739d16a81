//! Gives the shared library its soname: programs ask for the version that they were linked with.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Before 1.0 a minor version may change what C sees, so it is part of the name.
    let [major, minor] = ["MAJOR", "MINOR"]
        .map(|part| std::env::var(format!("CARGO_PKG_VERSION_{part}")).expect("cargo gives the version"));
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsidelane_c.so.{major}.{minor}");
}
