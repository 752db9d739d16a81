//! Graphs.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::sync::Arc;

use super::call;
use super::context::here;
use super::pointers::Out;
use crate::code::{Code, Result};
use crate::graph::{EXECUTABLES, Executable, GRAPHS};
use crate::stream::Stream;

fn instantiate(executable: Out<usize>, graph: usize) -> Result<()> {
    let context = here()?;
    let made = Executable::new(&*GRAPHS.get(graph)?, &context);
    executable.put(EXECUTABLES.insert(Arc::new(made)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(
    executable: Out<usize>,
    graph: usize,
    _flags: c_ulonglong,
) -> c_int {
    call(|| instantiate(executable, graph))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithParams(
    executable: Out<usize>,
    graph: usize,
    _how: *mut c_void,
) -> c_int {
    call(|| instantiate(executable, graph))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(executable: usize, _stream: usize) -> c_int {
    call(|| EXECUTABLES.get(executable).map(|_| ()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: usize, stream: usize) -> c_int {
    call(|| {
        let context = here()?;
        EXECUTABLES.get(executable)?.launch(&Stream::own(stream, &context)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: usize) -> c_int {
    call(|| GRAPHS.remove(graph).map(|_| ()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: usize) -> c_int {
    call(|| EXECUTABLES.remove(executable).map(|_| ()))
}

/// Nodes without their edges, in the order of the calls that were captured.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetNodes(graph: usize, nodes: Out<usize>, count: Out<usize>) -> c_int {
    call(|| {
        let graph = GRAPHS.get(graph)?;
        if nodes.is_null() {
            return count.put(graph.nodes.len());
        }
        nodes.fill(count.get()?, graph.nodes.iter().map(|(handle, _)| *handle));
        count.put(graph.nodes.len().min(count.get()?))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetType(node: usize, kind: Out<c_int>) -> c_int {
    call(|| {
        let found = GRAPHS
            .find(|graph| graph.nodes.iter().find(|(handle, _)| *handle == node).map(|(_, kind)| *kind));
        kind.put(found.ok_or(Code::INVALID_VALUE)? as c_int)
    })
}
