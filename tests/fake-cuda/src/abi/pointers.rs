//! Pointers that callers hand in. By the contract of the C interface each is null, or good for what
//! its function says; null is refused here, the rest cannot be checked.

use crate::code::{Code, Result};

/// Where a result goes.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Out<T> {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    pub fn put(self, value: T) -> Result<()> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller vouches for it.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// As `put`, for results that the caller may not want.
    pub fn offer(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so the caller vouches for it.
            unsafe { self.0.write(value) };
        }
    }

    /// Puts as many as there is room for.
    pub fn fill(self, room: usize, values: impl IntoIterator<Item = T>) {
        for (index, value) in values.into_iter().take(room).enumerate() {
            // SAFETY: the caller vouches for `room` places.
            unsafe { self.0.add(index).write(value) };
        }
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The present value.
    pub fn get(self) -> Result<T>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }

    pub fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// Where an argument is.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> In<T> {
    pub fn raw(&self) -> *const T {
        self.0
    }

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl<T: Copy> In<T> {
    /// Of a value of the fake's.
    pub fn of(value: &T) -> Self {
        In(value)
    }

    pub fn get(&self) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller vouches for it.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// So many in a row.
    pub fn all(&self, count: usize) -> Result<Vec<T>> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller vouches for `count` of them.
        Ok((0..count).map(|index| unsafe { self.0.add(index).read_unaligned() }).collect())
    }
}
