//! Proof, random check and mutants of the schedules in [`sidelane_core::schedule`]; and the naive
//! [`mod@reference`] of what calls must give.
//!
//! ```text
//!   scenario of calls --unroll--> operations of all ranks --prove--> no deadlock, no race, each byte written once
//!                                           |          \--random_check--> random visibility within the lanes' contract
//!                                        mutate: planted bugs that both must find
//!
//!   call program --value_flow--> every step finds the values that it needs from earlier steps
//!
//!   puts and signals over several queue pairs --striped--> every order keeps the lanes' contract
//! ```

pub mod mutate;
pub mod prove;
pub mod random;
pub mod random_check;
pub mod reference;
pub mod striped;
pub mod unroll;
pub mod value_flow;
