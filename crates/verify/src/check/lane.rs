//! Windows, and the operations in flight to them.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use sidelane_core::schedule::WindowId;

use crate::unroll::{Bytes, UnrolledProgram};

/// Bytes that one tag stands for: everything a schedule moves is a multiple of it.
const PIECE: u64 = 4;

/// One piece of a window.
#[derive(Clone, Copy)]
pub(super) struct Cell {
    owner: u32,
    window: WindowId,
    index: usize,
}

/// All windows of all ranks.
pub(super) struct Memory {
    cells: Vec<[Vec<u64>; 3]>,
}

impl Memory {
    pub fn new(story: &UnrolledProgram) -> Self {
        let cells = |bytes: u64| vec![0; bytes.div_ceil(PIECE) as usize];
        let windows = || [story.pool_bytes, story.control_bytes, story.pool_bytes].map(cells);
        Memory { cells: (0..story.ranks).map(|_| windows()).collect() }
    }

    pub fn read(&self, cell: Cell) -> u64 {
        self.cells[cell.owner as usize][cell.window.0 as usize][cell.index]
    }

    pub fn write(&mut self, cell: Cell, tag: u64) {
        self.cells[cell.owner as usize][cell.window.0 as usize][cell.index] = tag;
    }
}

/// The pieces of a range of bytes.
pub(super) fn cells(bytes: &Bytes) -> impl Iterator<Item = Cell> + use<> {
    let (owner, window) = (bytes.owner, bytes.window);
    let range = bytes.range.start / PIECE..bytes.range.end.div_ceil(PIECE);
    range.map(move |index| Cell { owner, window, index: index as usize })
}

/// Contents of a piece.
#[derive(Clone, Copy)]
pub(super) enum Load {
    /// A tag.
    Tag(u64),
    /// Whatever lies there when it is read.
    From(Cell),
}

/// In flight on one track.
#[derive(Clone)]
pub(super) enum Posted {
    Piece {
        to: Cell,
        load: Load,
    },
    /// A signal, and the pieces of its tag.
    Signal {
        word: usize,
        value: u64,
        tag: Vec<(Cell, u64)>,
    },
}

/// One track of one actor, as its lane sees it.
#[derive(Clone, Default)]
pub(super) struct Lane {
    posted: Vec<Posted>,
}

impl Lane {
    pub fn post(&mut self, posted: Posted) {
        self.posted.push(posted);
    }

    pub fn is_idle(&self) -> bool {
        self.posted.is_empty()
    }

    /// Local completion: sources that have not been read are read now.
    pub fn complete(&mut self, memory: &Memory) {
        for posted in &mut self.posted {
            if let Posted::Piece { load, .. } = posted
                && let Load::From(cell) = *load
            {
                *load = Load::Tag(memory.read(cell));
            }
        }
    }

    /// Delivers one piece or signal, any that may be next.
    pub fn deliver(&mut self, memory: &mut Memory, words: &mut [u64], random: &mut ChaCha8Rng) {
        let mut pick = random.random_range(0..self.posted.len());
        if matches!(self.posted[pick], Posted::Signal { .. }) {
            let pieces = self.posted[..pick].iter().filter(|p| matches!(p, Posted::Piece { .. })).count();
            // A signal waits for earlier puts; of several signals the oldest is next.
            pick = match pieces {
                0 => 0,
                _ => {
                    let nth = random.random_range(0..pieces);
                    let mut pieces = (0..pick).filter(|&p| matches!(self.posted[p], Posted::Piece { .. }));
                    pieces.nth(nth).unwrap_or(pick)
                }
            };
        }
        match self.posted.remove(pick) {
            Posted::Signal { word, value, tag } => {
                tag.into_iter().for_each(|(to, piece)| memory.write(to, piece));
                words[word] = value;
            }
            Posted::Piece { to, load: Load::Tag(tag) } => memory.write(to, tag),
            Posted::Piece { to, load: Load::From(cell) } => memory.write(to, memory.read(cell)),
        }
    }
}
