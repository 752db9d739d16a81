//! The other parallel strategies: meshes.

mod mesh;
