//! Lane `browser`: pages in a real Chromium.

mod accessibility;
mod blocks;
mod chosen_moment;
mod gestures;
mod html_report;
mod layout;
mod live_page;
mod process_list;
