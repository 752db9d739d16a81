//! Rules that the files of this repository keep.

mod call_kinds;
mod cargo_features;
mod comments;
mod features;
mod imports;
mod module_layering;
mod orders;
mod pages;
mod parts;
mod public_face;
mod row_layouts;
mod waits;
