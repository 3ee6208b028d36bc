//! The other ranks that a rank meets inside a step, and what it gave to them.
//! For: [`replica`](crate::replica), which starts a rank's thread for each local device.
//! Not here: the step itself (`lockstep-executor`), how bytes travel (the collective).

pub mod peers;
pub mod traffic;

pub use peers::RankPeers;
pub use traffic::Traffic;
